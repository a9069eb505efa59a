"""A conversation with a model: the messages so far, and what each answer took to decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from pydantic import Field

from specdec_cli.document import Count, ResultDocument, TimingResult
from specdec_cli.engine.prompts import ChatMessage, check_text
from specdec_cli.errors import UsageError
from specdec_cli.timing import Timing

if TYPE_CHECKING:
    from specdec_cli.measure.chat.chat_endpoint import EndpointSpeaker
    from specdec_cli.measure.chat.chat_engine import EngineSpeaker

Speaker: TypeAlias = "EngineSpeaker | EndpointSpeaker"
"""Answers a conversation: an engine, or a server."""


@dataclass(slots=True)
class ChatTurn:
    """A user message and its answer, which grows while it streams.

    Args:
        prompt: the user message.
        text: the answer so far.
        finish_reason: `stop`, `length`, or `abort` where Ctrl-C stopped it; None while it streams.
        prompt_tokens: tokens of the conversation before it; None where a server does not count them.
        cached_tokens: tokens of the prompt that the prefix cache held.
        completion_tokens: tokens of the answer; likewise.
        draft: name of the draft that guesses; None where a server does not say.
        num_speculative_tokens: tokens drafted per step; likewise.
        speculative: counts and rates of speculation under the keys of documents; None where nothing counts them.
        timing: seconds and tokens per second.
        notices: sentences about the answer for the user.
    """

    prompt: str
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    completion_tokens: Count | None = None
    draft: str | None = None
    num_speculative_tokens: Count | None = None
    speculative: dict[str, Any] | None = None
    timing: TimingResult = field(default_factory=Timing)
    notices: Annotated[list[str], Field(exclude=True)] = field(default_factory=list)

    def statistic(self, name: str) -> float | None:
        """One acceptance statistic by its key."""
        value = (self.speculative or {}).get(name)
        return None if value is None else float(value)


class ChatDocument(ResultDocument):
    """A conversation; `target` answered, and `endpoint` is null for an engine of this process."""

    schema_name: ClassVar[str] = "specdec.chat/1"

    target: str
    endpoint: str | None
    system: str | None
    turns: list[ChatTurn]


class ContextFullError(UsageError):
    """A conversation that leaves too little of the context to its answer."""


@dataclass(slots=True)
class ChatHistory:
    """The conversation so far.

    Args:
        system: the system message, or None.
        turns: user messages and their answers, oldest first.
        num_dropped: of the oldest turns, that are no longer sent.
    """

    system: str | None = None
    turns: list[ChatTurn] = field(default_factory=list)
    num_dropped: int = 0

    def messages(self, num_dropped: int = 0) -> list[ChatMessage]:
        """Every message so far, without the turns that are dropped."""
        message = [] if self.system is None else [ChatMessage("system", self.system)]
        for turn in self.turns[num_dropped:]:
            message += [ChatMessage("user", turn.prompt), ChatMessage("assistant", turn.text)]
        return message

    def ask(self, prompt: str, speaker: Speaker, watch: Watch, stopped: Callable[[], bool]) -> ChatTurn:
        """Send a user message; the turn stays in the conversation if the answer has text.

        Where the context is full, the oldest turns are dropped, and a notice says how many.

        Args:
            prompt: the user message.
            speaker: answers it.
            watch: called with the answer and its new text.
            stopped: whether to stop the answer.

        Raises:
            UsageError: an empty message, or one that does not fit the context by itself.
            SpecdecError: the answer failed.
        """
        check_text(prompt, "the message")
        num_dropped = self.num_dropped
        while True:
            try:
                messages = [*self.messages(num_dropped), ChatMessage("user", prompt)]
                turn = speaker.answer(messages, watch, stopped)
                break
            except ContextFullError:
                if num_dropped == len(self.turns):
                    raise
                num_dropped += 1
        more, self.num_dropped = num_dropped - self.num_dropped, num_dropped
        if more:
            which = "turn is" if more == 1 else f"{more} turns are"
            turn.notices.append(f"the oldest {which} no longer sent: the conversation fills the context")
        if turn.text:
            self.turns.append(turn)
        return turn

    def clear(self) -> None:
        """Forget every turn; the system message stays."""
        self.turns.clear()
        self.num_dropped = 0


Watch = Callable[[ChatTurn, str], None]
"""Takes an answer and its new text."""


def check_k(k: int, most: int) -> None:
    """Refuse a k that no request may have."""
    if not 0 <= k <= most:
        raise UsageError(f"k must be between 0 and {most}, not `{k}`", "0 decodes without a draft")
