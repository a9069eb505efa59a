"""The document of `chat`, `specdec.chat/1`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from specdec_cli.document import Count, Result, ResultDocument, TimingResult

if TYPE_CHECKING:
    from specdec_cli.measure.chat.chat import ChatHistory


class ChatTurnResult(Result):
    """A user message and its answer."""

    prompt: str
    text: str
    finish_reason: str | None
    prompt_tokens: Count | None
    cached_tokens: Count | None
    completion_tokens: Count | None
    draft: str | None
    num_speculative_tokens: Count | None
    speculative: dict[str, Any] | None
    timing: TimingResult


class ChatDocument(ResultDocument):
    """A conversation; `endpoint` is null for an engine of this process."""

    schema_name: ClassVar[str] = "specdec.chat/1"

    target: str
    endpoint: str | None
    system: str | None
    turns: list[ChatTurnResult]


def chat_body(history: ChatHistory, target: str, endpoint: str | None) -> dict[str, Any]:
    """The document's own fields, after those that every document has.

    Args:
        history: the conversation.
        target: the model that answered.
        endpoint: the server's address; None for an engine of this process.
    """
    turns = [ChatTurnResult.model_validate(turn) for turn in history.turns]
    return ChatDocument(target=target, endpoint=endpoint, system=history.system, turns=turns).as_json()
