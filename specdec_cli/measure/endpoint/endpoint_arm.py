"""A server as an arm: `start` opens the connections and chooses the model, `run` sends requests, `stop` closes.

Another engine as a subprocess is this arm behind one that launches the server first and ends it last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from specdec_cli.engine.arms import ArmRun
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import RunError
from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.counters import MetricsPage, read_settled
from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan
from specdec_cli.measure.endpoint.request_fields import request_body, sampling_fields
from specdec_cli.measure.endpoint.sending import Sender
from specdec_cli.proxy import Proxy
from specdec_cli.recipe.schema import Sampling
from specdec_cli.timing import timing_of

if TYPE_CHECKING:
    from specdec_cli.engine.decoding import Request

Given = TypeVar("Given")
_COUNTS_ON_REQUEST = {"sglang": {"return_spec_tokens_details": True}}
"""Fields that make an engine, by `owned_by` of its models, report each request's acceptance."""


class EndpointArm:
    """A server that is asked for answers.

    Args:
        plan: where it is and how it is asked.
        sampling: of every request.
        name: what a report calls it; its address without one.

    Attributes:
        model: the name that is asked for; known once it has started.
        owner: `owned_by` of its first model, which names the engine.
        server: what it calls itself, as `version` says which one; None where it does not say.
        proxy: what stands between, or None.
    """

    is_computing: bool | None = False

    def __init__(self, plan: EndpointPlan, sampling: Sampling, name: str = "") -> None:
        self.plan, self.name = plan, name or plan.address.root
        self.fields = sampling_fields(sampling, plan.max_tokens_field)
        self.model = plan.model or ""
        self.server: str | None = None
        self.version: str | None = None
        self.owner: str | None = None
        self.proxy: Proxy | None = None
        self._asked_for_counts: dict[str, Any] = {}
        self._stack = ExitStack()
        self._runner: asyncio.Runner | None = None
        self._endpoint: Endpoint | None = None

    def start(self) -> None:
        """Open the connections, choose the model, and read the server's name and version.

        Raises:
            EndpointError: there is no server, or it has no such model.
        """
        self._runner = self._stack.enter_context(asyncio.Runner())
        self._wait(self._open())

    def stop(self) -> None:
        """Close the connections."""
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            self._wait(endpoint.__aexit__(None, None, None))
        self._stack.close()
        self._runner = None

    def run(self, requests: Sequence[Request], stopped: Callable[[], bool]) -> ArmRun | None:
        """Send requests at once, as many as the plan allows, and count tokens as the server's usage does.

        Args:
            requests: their texts or messages; the server has a tokenizer of its own.
            stopped: whether to send no more.

        Raises:
            RunError: a request failed, or the server does not count its tokens.
        """
        answers = self.answers(requests, stopped)
        return None if answers is None else counts_and_times(answers)

    def answers(self, requests: Sequence[Request], stopped: Callable[[], bool]) -> list[Answer] | None:
        """The whole answers to requests that are sent at once, as `run`; None where some are missing."""
        plan = replace(self.plan, request_rate=inf, repeats=1, concurrency=self.plan.concurrency or len(requests))
        sender = Sender(plan, self.body, stopped, lambda: None)
        rows = [replace(request.row, max_new_tokens=request.params.max_new_tokens) for request in requests]
        self.send(sender, rows)
        sender.raise_failure()
        by_row = {visit.row.index: visit.answer for visit in sender.visits}
        whole = [answer for row in rows if (answer := by_row.get(row.index)) is not None]
        return whole if len(whole) == len(rows) else None

    def send(self, sender: Sender, rows: Sequence[PromptRow]) -> None:
        """Send prompts when they are due; what came back is in the sender's visits."""
        self._wait(sender.send(self._open_endpoint(), rows))

    def ask(self, row: PromptRow, watch: Callable[[Answer], None] | None = None) -> Answer:
        """Send one request for a prompt, as `Endpoint.ask`."""
        return self._wait(self._open_endpoint().ask(self.plan.path, self.body(row), watch))

    def whole(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request for an answer that is not streamed; the model's name is added."""
        return self._wait(self._open_endpoint().whole(path, {**self._asked_for_counts, "model": self.model, **body}))

    def page(self) -> MetricsPage | None:
        """The server's own counters once they stand still; None where it has none that are known."""
        return self._wait(read_settled(self._open_endpoint().text, self.model))

    @property
    def num_sent_again(self) -> int:
        """Requests that found their kept connection closed and were sent again."""
        return 0 if self._endpoint is None else self._endpoint.num_sent_again

    def body(self, row: PromptRow) -> dict[str, Any]:
        """The request body for a prompt."""
        plan = self.plan
        extra = {**self._asked_for_counts, **plan.extra_body}
        return request_body(row, self.model, plan.chat, self.fields, extra, plan.max_tokens_field)

    async def _open(self) -> None:
        plan = self.plan
        self._endpoint = endpoint = plan.protocol(plan.address, plan.key, plan.timeout_s, plan.concurrency)
        await endpoint.__aenter__()
        self.proxy = endpoint.proxy
        self.model = await endpoint.choose_model(self.model)
        self.server, self.version = endpoint.server, await endpoint.version()
        self.owner = endpoint.owner
        self._asked_for_counts = _COUNTS_ON_REQUEST.get(self.owner or "", {})

    def _open_endpoint(self) -> Endpoint:
        assert self._endpoint is not None, "an arm is started before it is asked"
        return self._endpoint

    def _wait(self, doing: Coroutine[Any, Any, Given]) -> Given:
        assert self._runner is not None, "an arm is started before it is asked"
        return self._runner.run(doing)


def counts_and_times(answers: Sequence[Answer]) -> ArmRun:
    """Counts and times of whole answers to requests that were sent together.

    The decode clock runs from the first text of all to the last. One token of each answer counts as there by then:
    how many tokens a chunk holds, no server says.

    Raises:
        RunError: there is no output, or the server does not count it.
    """
    check_counted(answers)
    counted = tuple(answer.num_tokens or 0 for answer in answers)
    begin = min(answer.sent for answer in answers)
    firsts = [answer.sent + answer.arrivals[0] for answer in answers if answer.arrivals]
    lasts = [answer.sent + max(answer.finish_s or 0.0, answer.arrivals[-1]) for answer in answers if answer.arrivals]
    if not firsts:
        raise RunError("the server's answers are empty: there is nothing to time", None)
    num_first = sum(number > 0 for number in counted)
    timing = timing_of(begin, min(firsts), max(lasts), sum(counted) - num_first)
    is_told = all(len(answer.token_ids) == num for answer, num in zip(answers, counted, strict=True))
    tokens = tuple(tuple(answer.token_ids) for answer in answers) if is_told else None
    return ArmRun(tokens, timing, num_first, counted=counted)


def check_counted(answers: Sequence[Answer]) -> None:
    """Refuse answers whose tokens the server does not count.

    Raises:
        RunError: it sends no usage, or one that cannot be right.
    """
    uncounted = [answer for answer in answers if answer.num_tokens is None]
    if not uncounted:
        return
    invalid = next((answer.invalid_usage for answer in uncounted if answer.invalid_usage is not None), None)
    why = "no usage with its streams" if invalid is None else f"an invalid usage, `completion_tokens: {invalid}`"
    raise RunError(f"the server sends {why}, so its tokens cannot be counted", None)


@contextmanager
def started(arms: Sequence[EndpointArm]) -> Iterator[None]:
    """Arms that can be asked meanwhile."""
    try:
        for arm in arms:
            arm.start()
        yield
    finally:
        for arm in arms:
            arm.stop()
