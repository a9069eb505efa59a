"""A conversation with a model: the messages so far, and what each answer took to decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec_cli.engine.outputs import Timing
from specdec_cli.engine.prompts import ChatMessage, check_text
from specdec_cli.errors import UsageError


@dataclass(slots=True)
class ChatReply:
    """An answer; its fields are updated while it streams.

    Args:
        text: the text so far.
        finish_reason: `stop`, `length`, or `abort` where Ctrl-C stopped it; None while it streams.
        num_prompt_tokens: tokens of the conversation before it; None where a server does not count them.
        num_cached_tokens: tokens of the prompt that the prefix cache held.
        num_tokens: tokens of the answer; likewise.
        speculative: acceptance statistics under the keys of INTERFACE's `stats`; None where nothing counts them.
        timing: seconds and tokens per second.
        notices: sentences about the answer for the user.
    """

    text: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_tokens: int | None = None
    speculative: dict[str, Any] | None = None
    timing: Timing = field(default_factory=Timing)
    notices: list[str] = field(default_factory=list)

    def statistic(self, name: str) -> float | None:
        """One acceptance statistic by its key."""
        value = (self.speculative or {}).get(name)
        return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A user message and its answer.

    Args:
        prompt: the user message.
        reply: the answer.
        draft: name of the draft that guessed it; None where a server does not say.
        k: tokens drafted per step; likewise.
    """

    prompt: str
    reply: ChatReply
    draft: str | None
    k: int | None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        reply = self.reply
        return {
            "prompt": self.prompt,
            "text": reply.text,
            "finish_reason": reply.finish_reason,
            "prompt_tokens": reply.num_prompt_tokens,
            "cached_tokens": reply.num_cached_tokens,
            "completion_tokens": reply.num_tokens,
            "draft": self.draft,
            "num_speculative_tokens": self.k,
            "speculative": reply.speculative,
            "timing": reply.timing.as_dict(),
        }


@dataclass(slots=True)
class ChatHistory:
    """The conversation so far.

    Args:
        system: the system message, or None.
        turns: user messages and their answers, oldest first.
    """

    system: str | None = None
    turns: list[ChatTurn] = field(default_factory=list)

    def messages(self) -> list[ChatMessage]:
        """Every message so far."""
        said = [] if self.system is None else [ChatMessage("system", self.system)]
        for turn in self.turns:
            said += [ChatMessage("user", turn.prompt), ChatMessage("assistant", turn.reply.text)]
        return said

    def ask(self, prompt: str, speaker: Speaker, watch: Watch, stopped: Callable[[], bool]) -> ChatTurn:
        """Send a user message; the turn stays in the conversation if the answer has text.

        Args:
            prompt: the user message.
            speaker: answers it.
            watch: called with the answer and its new text.
            stopped: whether to stop the answer.

        Raises:
            UsageError: an empty message, or a conversation that no longer fits the context.
            SpecdecError: the answer failed.
        """
        check_text(prompt, "the message")
        draft, k = speaker.draft, speaker.k
        reply = speaker.answer([*self.messages(), ChatMessage("user", prompt)], watch, stopped)
        turn = ChatTurn(prompt, reply, draft, k)
        if reply.text:
            self.turns.append(turn)
        return turn

    def clear(self) -> None:
        """Forget every turn; the system message stays."""
        self.turns.clear()


Watch = Callable[[ChatReply, str], None]


class Speaker(Protocol):
    """Answers a conversation: an engine, or a server."""

    @property
    def target(self) -> str:
        """The model that answers."""
        ...

    @property
    def k(self) -> int | None:
        """Tokens drafted per step; None where the server decides."""
        ...

    @property
    def draft(self) -> str | None:
        """Name of the draft; None where the server decides."""
        ...

    def set_k(self, k: int) -> None:
        """Draft k tokens per step from the next answer on.

        Raises:
            UsageError: k is out of range, or cannot be chosen here.
        """
        ...

    def set_draft(self, name: str) -> None:
        """Use another draft from the next answer on.

        Raises:
            UsageError: there is no such draft, or it cannot be chosen here.
        """
        ...

    def answer(self, messages: Sequence[ChatMessage], watch: Watch, stopped: Callable[[], bool]) -> ChatReply:
        """Answer the last message.

        Raises:
            UsageError: the conversation does not fit the context.
            SpecdecError: the answer failed.
        """
        ...


def check_k(k: int, most: int) -> None:
    """Refuse a k that no request may have.

    Raises:
        UsageError: it is out of range.
    """
    if not 0 <= k <= most:
        raise UsageError(f"k must be between 0 and {most}, not `{k}`", "0 decodes without a draft")
