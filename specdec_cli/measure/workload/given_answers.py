"""Answers that rows bring along with their prompts, for training on them."""

from __future__ import annotations

from typing import Any

from specdec_cli.engine.prompts import ChatMessage, PromptRow
from specdec_cli.errors import UsageError
from specdec_cli.measure.workload.chats import CHAT_COLUMNS, answered_chat, is_chat, unwritten

ANSWER_COLUMNS = ("answer", "response", "output", "completion", "chosen")


def given_answer(row: PromptRow) -> str:
    """The answer to a row's prompt, from a column such as `answer`.

    Args:
        row: with the values that it was read from.

    Raises:
        UsageError: it has none.
    """
    found = _column(row)
    if found is None:
        raise _no_answer(row)
    return found


def given_chat(row: PromptRow) -> list[dict[str, str]]:
    """The messages of a row's conversation up to its last answer.

    That is the assistant's last message, or the column `answer` and its like behind a conversation that the user ends.

    Args:
        row: with its conversation, and the values that it was read from.

    Raises:
        UsageError: no message is the assistant's and no column has an answer, or a message is no text.
    """
    found, answer = _conversation(row), _column(row)
    if answer is not None and len(found) <= len(row.messages):
        found = [*row.chat(), ChatMessage("assistant", answer).as_dict()]
    if not any(one["role"] == "assistant" and one["content"].strip() for one in found):
        raise _no_answer(row)
    return found


def _conversation(row: PromptRow) -> list[dict[str, str]]:
    """The messages of a column with a conversation up to the assistant's last; none without such a column."""
    where = f"row {row.index + 1}"
    values = (unwritten(row.values.get(name), where) for name in CHAT_COLUMNS)
    messages: list[dict[str, Any]] = next((value for value in values if is_chat(value)), [])
    found = answered_chat(messages, where)
    if found and row.messages and row.messages[0].role == "system" != found[0].role:
        found = (row.messages[0], *found)
    return [one.as_dict() for one in found]


def _column(row: PromptRow) -> str | None:
    """The first text in a column of answers."""
    found = (row.values.get(name) for name in ANSWER_COLUMNS)
    return next((one for one in found if isinstance(one, str) and one.strip()), None)


def _no_answer(row: PromptRow) -> UsageError:
    columns = ", ".join(f"`{name}`" for name in ANSWER_COLUMNS)
    hint = f"end its messages with the assistant's (--chat), or fill one of {columns}"
    return UsageError(f"row {row.index + 1} has no answer to keep", hint)
