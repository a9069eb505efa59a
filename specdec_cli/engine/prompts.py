"""Prompts: text or conversations that may bring an id, a category, a length and a seed of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specdec_cli.errors import UsageError


class EmptyPromptError(UsageError):
    """A prompt, or a row of a file, that holds nothing to ask."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation; its role is user, assistant or system."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """As a chat template and a server take it."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt and what its row asked for.

    Args:
        index: its place among the rows, from 0.
        prompt: the text; of a conversation the first that the user says.
        id: the row's own name, if it has one.
        category: the row's kind, if it says.
        max_new_tokens: its own length, or None for the run's.
        seed: its own seed (its noise index is then 0; a negative one is drawn), or None for the run's.
        messages: the whole conversation up to its last user message, where it is decoded as one; user messages that
            nothing answers are turns, each answered by the model before the next.
        turn: which turn of its conversation it is, from 1, where there are several.
        values: the columns of the row that it was read from.
    """

    index: int
    prompt: str
    id: str | int | None = None
    category: str | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    messages: tuple[ChatMessage, ...] = ()
    turn: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def chat(self) -> list[dict[str, str]]:
        """The messages that a chat template or a server is given."""
        return [message.as_dict() for message in self.messages or (ChatMessage("user", self.prompt),)]

    def with_system(self, system: ChatMessage) -> PromptRow:
        """The same row with this system message instead of its own."""
        rest = self.messages or (ChatMessage("user", self.prompt),)
        return replace(self, messages=(system, *(message for message in rest if message.role != "system")))


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Rows, and notices about how they were read."""

    rows: list[PromptRow]
    notices: list[str] = field(default_factory=list)


def rows_of(prompts: Iterable[str]) -> list[PromptRow]:
    """Rows of prompts given one by one.

    Raises:
        UsageError: no prompt, or an empty one.
    """
    rows = [PromptRow(index, prompt) for index, prompt in enumerate(prompts)]
    for row in rows:
        check_text(row.prompt, f"prompt {row.index + 1} of {len(rows)}" if len(rows) > 1 else "the prompt")
    if not rows:
        raise UsageError("there is no prompt", "give one as an argument, with --prompt-file, or on standard input")
    return rows


def check_text(prompt: str, what: str) -> None:
    """Refuse text that says nothing, or that no tokenizer reads.

    Raises:
        EmptyPromptError: it is empty.
        UsageError: it holds half a character.
    """
    if not prompt.strip():
        raise EmptyPromptError(f"{what} is empty", "give at least one word")
    check_unicode(prompt, what)


def check_unicode(text: str, what: str) -> None:
    """Refuse text that no tokenizer reads.

    Raises:
        UsageError: it holds half a character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not valid Unicode: character `{error.start}`", "give it as UTF-8") from error
