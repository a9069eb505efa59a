"""Another engine as an arm: its server is started, asked like any endpoint, and ended.

Each run is one request at a time or a batch sent together. Its counts of speculation are those of the answers; where
these do not count their steps, the increase of the server's own counters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specdec_cli.engine.arms import ArmRun
from specdec_cli.errors import RunError, UsageError
from specdec_cli.measure.elsewhere.engine_process import EngineProcess
from specdec_cli.measure.endpoint.address import ENGINE_OPTION, Address, parse_address
from specdec_cli.measure.endpoint.answer import Answer, own_counts
from specdec_cli.measure.endpoint.counters import MetricsPage, difference
from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm, counts_and_times
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan
from specdec_cli.measure.endpoint.request_counts import AnswerCounts, CountsSource
from specdec_cli.measure.machine import interruption
from specdec_cli.measure.workload.turns import request_of, turn_ends
from specdec_cli.measure.workload.workload import Workload
from specdec_cli.recipe.schema import Sampling
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.engine.decoding import Request
    from specdec_cli.engine.prompts import PromptRow
    from specdec_cli.recipe import Recipe

NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Said in every request that does not say otherwise: a server's own defaults come from the model's files."""
DYING_SECONDS = 15.0
"""How long an engine that no longer answers may take to end."""
_SILENCE_SECONDS = 300.0
_VERSION = re.compile(r"^version: (\S+)", re.MULTILINE)
"""The version that an engine writes into its log, where its server does not tell it."""


class ServerArm(EndpointArm):
    """An engine that runs as a subprocess: an endpoint whose server is launched first and ended last.

    Args:
        name: what a report calls it.
        process: the engine, not yet started.
        sampling: of every request.
        drafts: whether the engine speculates, so that it must count.
        chat: whether prompts are messages.
        concurrency: most requests at a time.
        protocol: asks its server.

    Attributes:
        notices: sentences about its counters.
        acceptance_from: source of its counts of speculation; None as long as there are none.
    """

    is_computing = None

    def __init__(
        self,
        name: str,
        process: EngineProcess,
        sampling: Sampling,
        drafts: bool,
        chat: bool = False,
        concurrency: int = 1,
        protocol: type[Endpoint] = Endpoint,
    ) -> None:
        address = Address("", "")
        plan = EndpointPlan(address, chat=chat, concurrency=concurrency, timeout_s=_SILENCE_SECONDS, protocol=protocol)
        super().__init__(plan, sampling, name)
        self.notices: list[str] = []
        self.acceptance_from: CountsSource | None = None
        self.process, self.drafts = process, drafts
        self._page: MetricsPage | None = None

    @property
    def is_up(self) -> bool:
        """Whether its server runs and can be asked."""
        return self._endpoint is not None

    def start(self) -> None:
        """Start the engine and wait until it answers.

        Raises:
            EngineError: it does not start.
            EndpointError: it starts and does not answer like a server of a model.
        """
        self._stack.callback(self.process.stop)
        address = parse_address(self.process.start(), ENGINE_OPTION)
        extra = {name: value for name, value in NEUTRAL.items() if name not in self.fields}
        self.plan = replace(self.plan, address=address, extra_body=extra | {"return_token_ids": True})
        super().start()
        if self.version is None and (told := _VERSION.search(self.process.log_text)):
            self.version = told[1]
        self._page = self.page() if self.drafts else None

    def run(self, requests: Sequence[Request], stopped: Callable[[], bool]) -> ArmRun | None:
        """Decode requests together; None where it was stopped before the end.

        Raises:
            EngineError: the engine has ended.
            RunError: a request failed, or its tokens cannot be counted.
        """
        before = interruption.look_at_machine(self.process.cpu_seconds)
        with self._giving_reason():
            answers = self.answers(requests, stopped)
        lost = interruption.look_at_machine(self.process.cpu_seconds).others_share_since(before)
        if answers is None:
            return None
        run, counted = counts_and_times(answers), self._counted(answers)
        return replace(run, counters=counted.counts, outcomes=counted.outcomes, lost_share=lost)

    def decode(self, row: PromptRow, watch: Callable[[Answer], None]) -> tuple[Answer, AnswerCounts]:
        """Decode one prompt, as `ask`; gives its answer and counts."""
        with self._giving_reason():
            answer = self.ask(row, watch)
        return answer, self._counted([answer])

    def _counted(self, answers: Sequence[Answer]) -> AnswerCounts:
        """Counts of answers, by their own or by the server's counters since they were last read."""
        if not self.drafts:
            return AnswerCounts({})
        own = own_counts(answers)
        if own is not None:
            self.acceptance_from, self._page = "answers", None
            return own
        with self._giving_reason():
            before, self._page = self._page, self.page()
        self.acceptance_from = None if self._page is None else "counters"
        counters = difference(before, self._page, sum(answer.num_tokens or 0 for answer in answers))
        self.notices += [notice for notice in counters.notices if notice not in self.notices]
        return counters.counted

    def whole(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request without model and sampling for an answer that is not streamed, at temperature 0."""
        with self._giving_reason():
            return super().whole(path, {"temperature": 0.0, **NEUTRAL, **body})

    def prompt_ids(self, row: PromptRow) -> list[int] | None:
        """A prompt's token ids by the engine's own tokenizer; None where it does not tell them."""
        prompt = {"messages": row.chat()} if self.plan.chat else {"prompt": row.prompt}
        answer = self.whole(self.plan.path, {**prompt, "max_tokens": 1, "return_token_ids": True})
        ids = answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids")
        return ids if isinstance(ids, list) else None

    @contextmanager
    def _giving_reason(self) -> Iterator[None]:
        """Replace the connection's error by the engine's own reason if the engine has ended."""
        try:
            yield
        except RunError:
            self.process.check(DYING_SECONDS)
            raise


def check_single_turns(rows: Sequence[PromptRow], engine: str) -> None:
    """Refuse conversations in which the user speaks several times."""
    several = next((row for row in rows if len(turn_ends(row)) > 1), None)
    if several is not None:
        raise UsageError(
            f"prompt {several.index + 1} is a conversation of several turns, and --engine {engine} takes single ones",
            "make each turn a prompt of its own",
        )


def requests_of(rows: Sequence[PromptRow], recipe: Recipe) -> Workload:
    """The workload of rows without token ids, because the other engine tokenizes them.

    Raises:
        UsageError: a row is a conversation of several turns.
    """
    check_single_turns(rows, recipe.engine.name)
    params = SamplingParams(**recipe.sampling.model_dump() | {"logprobs": None})
    return Workload(recipe.workload.dataset, tuple(request_of(row, [], params) for row in rows), (), None)
