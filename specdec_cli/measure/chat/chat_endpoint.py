"""Answers a conversation with an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from specdec_cli.engine.prompts import ChatMessage, PromptRow
from specdec_cli.errors import UsageError
from specdec_cli.measure.chat.chat import ChatTurn, ContextFullError, Watch, check_k
from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.counters import MetricsPage, difference, read_page, read_settled
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan
from specdec_cli.measure.endpoint.refusal import EndpointError
from specdec_cli.measure.endpoint.server_counts import statistics
from specdec_cli.recipe.schema import Sampling
from specdec_cli.timing import Timing

_LOOK_SECONDS = 0.1
_OUR_SERVER = "specdec"
_TOO_LONG = ("context", "too long", "token limit", "too many tokens")
"""Words with which servers refuse a conversation that does not fit."""


class EndpointSpeaker(EndpointArm):
    """A server that answers one conversation; a context manager that holds the connection.

    Args:
        plan: where the server is and how it is asked.
        sampling: of every request.
        most_k: largest k that may be chosen.
        has_length: whether requests limit the length of answers; else the server does.

    Attributes:
        k: tokens drafted per step that requests ask for; None leaves it to the server.
        draft: likewise.
    """

    def __init__(self, plan: EndpointPlan, sampling: Sampling, most_k: int, has_length: bool) -> None:
        super().__init__(plan, sampling)
        if not has_length:
            del self.fields[plan.max_tokens_field]
        self.k: int | None = None
        self.draft: str | None = None
        self._most_k = most_k
        self._reads_metrics = True

    @property
    def target(self) -> str:
        """The model that is asked."""
        return self.model

    def __enter__(self) -> EndpointSpeaker:
        """Connect and choose the model."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.stop()

    def set_k(self, k: int) -> None:
        """Ask the server for k tokens per step from the next answer on.

        Raises:
            UsageError: k is out of range, or cannot be chosen here.
        """
        self._check_is_ours("/k")
        check_k(k, self._most_k)
        self.k = k

    def set_draft(self, name: str) -> None:
        """Ask the server for another draft; `own` leaves the choice to the server."""
        self._check_is_ours("/draft")
        self.draft = None if name == "own" else name

    def answer(self, messages: Sequence[ChatMessage], watch: Watch, stopped: Callable[[], bool]) -> ChatTurn:
        """Answer the last message.

        Raises:
            ContextFullError: the conversation leaves too little of the context to the answer.
            SpecdecError: the answer failed.
        """
        try:
            return self._wait(self._answer(tuple(messages), watch, stopped))
        except EndpointError as error:
            if error.status != 400 or not any(words in error.message.lower() for words in _TOO_LONG):
                raise
            hint = "if the conversation no longer fits the context, /clear starts a new one"
            raise ContextFullError(error.message, hint) from error

    def _check_is_ours(self, command: str) -> None:
        if self._open_endpoint().owner != _OUR_SERVER:
            raise UsageError(
                f"`{command}` has no effect on this server, which chooses draft and k when it starts",
                "only `specdec serve` takes them with each request",
            )

    async def _answer(self, messages: tuple[ChatMessage, ...], watch: Watch, stopped: Callable[[], bool]) -> ChatTurn:
        turn = ChatTurn(messages[-1].content, draft=self.draft, num_speculative_tokens=self.k)
        before = await self._page()

        def fold(answer: Answer) -> None:
            watch(turn, _fold(turn, answer))

        asked = asyncio.ensure_future(self._open_endpoint().ask(self.plan.path, self._body(messages), fold))
        try:
            while not asked.done():
                await asyncio.wait([asked], timeout=_LOOK_SECONDS)
                watch(turn, "")
                if stopped():
                    asked.cancel()
            answer = asked.result()
        except asyncio.CancelledError:
            turn.finish_reason = "abort"
            return turn
        finally:
            asked.cancel()
        if turn.finish_reason == "length":
            turn.notices.append(
                "the answer was cut by -n/--max-new-tokens, the server's limit or the end of the context"
            )
        if answer.speculation is not None:
            self._reads_metrics = False
        elif before is not None:
            await self._count(turn, before)
        return turn

    def _body(self, messages: tuple[ChatMessage, ...]) -> dict[str, Any]:
        body = self.body(PromptRow(0, messages[-1].content, messages=messages))
        asked = {"num_speculative_tokens": None if self.draft == "none" else self.k, "draft": self.draft}
        speculative = {name: value for name, value in asked.items() if value is not None}
        return body | ({"speculative": speculative} if speculative else {})

    async def _page(self) -> MetricsPage | None:
        """The server's counters, unless its answers hold their own acceptance or it has none."""
        if not self._reads_metrics:
            return None
        page = await read_page(self._open_endpoint().text, self.model)
        self._reads_metrics = page is not None
        return page

    async def _count(self, turn: ChatTurn, before: MetricsPage) -> None:
        """Acceptance by what the answer added to the server's counters."""
        after = await read_settled(self._open_endpoint().text, self.model)
        counters = difference(before, after, turn.completion_tokens)
        turn.speculative = statistics(counters.added)
        turn.notices += counters.notices


def _fold(turn: ChatTurn, answer: Answer) -> str:
    """Update a turn by what its stream holds; gives its new text."""
    text = answer.text[len(turn.text) :]
    turn.text += text
    turn.finish_reason = answer.finish_reason
    turn.completion_tokens, turn.prompt_tokens = answer.num_tokens, answer.prompt_tokens
    turn.cached_tokens = answer.cached_tokens
    if answer.arrivals:
        decode_s = answer.arrivals[-1] - answer.arrivals[0]
        rate = None if not answer.tpot_s else 1 / answer.tpot_s
        turn.timing = Timing(answer.ttft_s, decode_s, answer.end_s, rate)
    if answer.speculation is not None:
        turn.speculative = statistics(answer.speculation.counts)
    return text
