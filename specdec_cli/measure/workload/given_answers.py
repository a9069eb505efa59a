"""Answers that rows bring along with their prompts, for training on them."""

from __future__ import annotations

from typing import Any

from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import UsageError
from specdec_cli.measure.workload.chats import CHAT_COLUMNS, is_chat, text_of

ANSWER_COLUMNS = ("answer", "response", "output", "completion", "chosen")


def given_answer(row: PromptRow, chat: bool) -> str:
    """The answer to a row's prompt: the conversation's last message, or a column such as `answer`.

    Args:
        row: with the values that it was read from.
        chat: whether its prompt is a conversation.

    Raises:
        UsageError: it has none.
    """
    found = _last_message(row) if chat else None
    if found is None:
        found = next((row.values[name] for name in ANSWER_COLUMNS if isinstance(row.values.get(name), str)), None)
    if not isinstance(found, str) or not found.strip():
        columns = ", ".join(f"`{name}`" for name in ANSWER_COLUMNS)
        said = f"row {row.index + 1} has no answer to keep"
        raise UsageError(said, f"end its messages with the assistant's (--chat), or fill one of {columns}")
    return found


def _last_message(row: PromptRow) -> str | None:
    """The assistant's message behind the last one of the user."""
    messages: Any = next((row.values[name] for name in CHAT_COLUMNS if is_chat(row.values.get(name))), None)
    if not messages:
        return None
    last = messages[-1]
    role = str(last.get("role") or last.get("from"))
    if role not in ("assistant", "gpt"):
        return None
    return text_of(last.get("content", last.get("value")), f"row {row.index + 1}", "the answer")
