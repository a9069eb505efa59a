"""Another engine as an arm: its server is started, asked like any endpoint, and ended.

Each run is one request at a time or a batch sent together; the increase of the server's own counters goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specdec_cli.engine.arms import ArmRun
from specdec_cli.errors import RunError, UsageError
from specdec_cli.measure.elsewhere.engine_process import EngineProcess
from specdec_cli.measure.endpoint.address import ENGINE_OPTION, parse_address
from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.counters import MetricsPage, difference
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan
from specdec_cli.measure.endpoint.request_fields import sampling_fields
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


class ServerArm:
    """An engine that runs as a subprocess.

    Args:
        name: what a report calls it.
        process: the engine, not yet started.
        sampling: of every request.
        drafts: whether the engine speculates, so that it must count.
        chat: whether prompts are messages.
        concurrency: most requests at a time.

    Attributes:
        version: what the server says, once it has started; None where it does not say.
        notices: sentences about its counters.
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
    ) -> None:
        self.name = name
        self.version: str | None = None
        self.notices: list[str] = []
        self.process, self.drafts = process, drafts
        self._sampling, self._chat, self._concurrency = sampling, chat, concurrency
        self._endpoint: EndpointArm | None = None
        self._page: MetricsPage | None = None
        self._stack = ExitStack()

    @property
    def is_up(self) -> bool:
        """Whether its server runs and can be asked."""
        return self._endpoint is not None

    @property
    def endpoint(self) -> EndpointArm:
        """The server, once it has started."""
        assert self._endpoint is not None, "an arm is started before it is asked"
        return self._endpoint

    def start(self) -> None:
        """Start the engine and wait until it answers.

        Raises:
            EngineError: it does not start.
            EndpointError: it starts and does not answer like a server of a model.
        """
        self._stack.callback(self.process.stop)
        address = parse_address(self.process.start(), ENGINE_OPTION)
        fields = sampling_fields(self._sampling)
        extra = {name: value for name, value in NEUTRAL.items() if name not in fields} | {"return_token_ids": True}
        plan = EndpointPlan(
            address, chat=self._chat, concurrency=self._concurrency, timeout_s=_SILENCE_SECONDS, extra_body=extra
        )
        arm = EndpointArm(plan, self._sampling, self.name)
        self._stack.callback(arm.stop)
        arm.start()
        self._endpoint, self.version, self._page = arm, arm.version, arm.page()

    def run(self, requests: Sequence[Request], stopped: Callable[[], bool]) -> ArmRun | None:
        """Decode requests together; None where it was stopped before the end.

        Raises:
            EngineError: the engine has ended.
            RunError: a request failed, or its tokens cannot be counted.
        """
        before = interruption.look_at_machine(self.process.cpu_seconds)
        run: ArmRun | None = self._asked(lambda: self.endpoint.run(requests, stopped))
        lost = interruption.look_at_machine(self.process.cpu_seconds).others_share_since(before)
        return None if run is None else replace(run, counters=self._added(sum(run.lengths)), lost_share=lost)

    def ask(self, row: PromptRow, watch: Callable[[Answer], None]) -> tuple[Answer, Mapping[str, float]]:
        """Decode one prompt; its answer, and by how much the server's counters grew.

        Args:
            row: the prompt.
            watch: called with the answer so far after each event of the stream.

        Raises:
            EngineError: the engine has ended.
            RunError: the request failed.
        """
        answer: Answer = self._asked(lambda: self.endpoint.ask(row, watch))
        return answer, self._added(answer.num_tokens)

    def _added(self, num_tokens: int | None) -> Mapping[str, float]:
        """By how much the server's counters grew since they were last read."""
        before, self._page = self._page, self._asked(self.endpoint.page)
        counters = difference(before, self._page, num_tokens)
        if self.drafts:
            self.notices += [notice for notice in counters.notices if notice not in self.notices]
        return counters.added

    def whole(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask for an answer that is not streamed, at temperature 0.

        Args:
            path: `/completions` or `/chat/completions`.
            body: the request, without model and sampling.

        Raises:
            EngineError: the engine has ended.
            RunError: the request failed.
        """
        asked = {"model": self.endpoint.model, "temperature": 0.0, **NEUTRAL, **body}
        found: dict[str, Any] = self._asked(lambda: self.endpoint.whole(path, asked))
        return found

    def prompt_ids(self, row: PromptRow) -> list[int] | None:
        """A prompt's token ids by the engine's own tokenizer; None where it does not tell them."""
        prompt = {"messages": row.chat()} if self._chat else {"prompt": row.prompt}
        answer = self.whole(self.endpoint.plan.path, {**prompt, "max_tokens": 1, "return_token_ids": True})
        found = answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids")
        return found if isinstance(found, list) else None

    def stop(self) -> None:
        """Close the connections and end every process of the engine."""
        self._endpoint = None
        self._stack.close()

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """Answer to a request; a server that is gone gives its engine's reason instead of the connection's."""
        try:
            return ask()
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
