"""Conversations in rows: OpenAI's `messages`, ShareGPT's `conversations`, Spec-Bench's `turns`, as messages of text."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_cli.engine.prompts import ChatMessage, EmptyPromptError, PromptRow, check_text
from specdec_cli.errors import UsageError

CHAT_COLUMNS = ("messages", "conversations", "conversation")
PROMPT_COLUMNS = ("prompt", "turns", "question", "instruction", *CHAT_COLUMNS, "text")
"""Columns that hold prompts, the surest first."""
ANSWER_COLUMNS = ("answer", "response", "output", "completion", "chosen")
"""Columns with answers to train on."""
_SPEAKERS = ("role", "from")
_WORDS = ("content", "value")
_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "ai"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
_WORDS_OF: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    dict: "object",
    list: "list",
}
_CALLS = ("tool_calls", "function_call")
_TEXT_PARTS = ("text", "input_text", "output_text")


def is_chat(value: object) -> bool:
    """Whether a value is a list of messages, however they name who speaks."""
    if not isinstance(value, list) or not all(isinstance(message, dict) and _speaker(message) for message in value):
        return False
    return any(word in message for message in value for word in _WORDS)


def is_broken_chat(value: object) -> bool:
    """Whether a value is a list of messages of which one has no speaker or none has a text."""
    if not isinstance(value, list) or is_chat(value):
        return False
    messages = [item for item in value if item]
    if not all(item is None or isinstance(item, dict) for item in value):
        return False
    return any(key in message for message in messages for key in (*_SPEAKERS, *_WORDS)) or bool(value and not messages)


def broken_chat(messages: Sequence[Mapping[str, Any] | None], where: str) -> EmptyPromptError:
    """The error for the first message that cannot be read."""
    for place, message in enumerate(messages, start=1):
        if message is None:
            return EmptyPromptError(f"{where}: message {place} is null", "give each message its role and its text")
        if not _speaker(message):
            return _no_speaker(f"{where}: message {place}")
    return _no_text(f"{where}: message 1")


def unwritten(value: Any, where: str) -> Any:
    """A conversation that a table holds as text, JSON or Python's; everything else as it is.

    Raises:
        UsageError: text that is a conversation and cannot be read back.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[{", "array([{")):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            chat = read(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return chat if is_chat(chat) else value
    head = value.lstrip()[:40].replace('"', "'")
    if any(head.startswith((f"[{{'{name}':", f"array([{{'{name}':")) for name in (*_SPEAKERS, *_WORDS)):
        raise UsageError(
            f"{where}: the prompt is a conversation printed as text, which cannot be read back",
            "save the rows as JSONL or Parquet, where a list stays a list",
        )
    return value


def is_longer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation has more to read than its first user message and what answers it."""
    speakers = [_ROLES.get(str(message[_speaker(message) or ""]).lower()) for message in messages]
    return speakers.count("user") > 1 or speakers[:1] != ["user"]


def first_user_text(messages: Sequence[Mapping[str, Any]], where: str) -> str:
    """The text of the first message that a user says.

    Raises:
        UsageError: there is none, or it is no text.
    """
    for place, message in enumerate(messages, start=1):
        if _role(message, f"{where}: message {place}") == "user":
            return _content(message, f"{where}: message {place}")
    raise _no_user(where)


def whole_chat(messages: Sequence[Mapping[str, Any]], where: str) -> tuple[ChatMessage, ...]:
    """A conversation up to its last user message; what answers that one is for the model to say.

    Raises:
        UsageError: no user message, or a message that is not text.
    """
    chat = _chat_until("user", messages, where)
    if not chat:
        raise _no_user(where)
    return chat


def _chat_until(last: str, messages: Sequence[Mapping[str, Any]], where: str) -> tuple[ChatMessage, ...]:
    """A conversation up to the last message of a role; empty without one."""
    roles = [_role(message, f"{where}: message {place}") for place, message in enumerate(messages, start=1)]
    end = len(roles) - roles[::-1].index(last) if last in roles else 0
    chat = []
    for place, (role, message) in enumerate(zip(roles[:end], messages[:end], strict=True), start=1):
        if role not in ("user", "assistant", "system"):
            raise UsageError(
                f"{where}: message {place} is of `{role}`, and only user, assistant and system are read",
                "leave --chat out to decode the first user message alone",
            )
        if any(message.get(key) for key in _CALLS):
            raise UsageError(
                f"{where}: message {place} calls tools, and only text is read",
                "leave --chat out to decode the first user message alone",
            )
        chat.append(ChatMessage(role, _content(message, f"{where}: message {place}")))
    return tuple(chat)


def text_of(value: Any, where: str, what: str = "the prompt") -> str:
    """Text, or the lines of a list of text parts, as OpenAI's messages have them.

    Raises:
        EmptyPromptError: null, or a list without parts.
        UsageError: anything else, named by its kind.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value):
        return "\n".join(_part(part, where, what) for part in value)
    kind = EmptyPromptError if value is None or value == [] else UsageError
    raise kind(f"{where}: {what} must be a string, not {kind_of(value)}", _hint_for(value))


def kind_of(value: object) -> str:
    """The type of a value, in words."""
    if isinstance(value, dict):
        is_picture = {"bytes", "path"} <= value.keys()
        return "an image or audio file" if is_picture else "an object"
    if value == []:
        return "an empty list"
    if isinstance(value, list):
        inner = {_WORDS_OF.get(type(item)) for item in value[:100]}
        return f"a list of {inner.pop()}s" if len(inner) == 1 and None not in inner else "a list"
    if value is None or isinstance(value, bytes):
        return "null" if value is None else "binary data"
    return f"a {_WORDS_OF.get(type(value), type(value).__name__)}"


def _speaker(message: Mapping[str, Any]) -> str | None:
    """The key that says who speaks."""
    return next((name for name in _SPEAKERS if isinstance(message.get(name), str)), None)


def _role(message: Mapping[str, Any], where: str) -> str:
    """The speaker's role in the words of chat templates; an unknown role under its own name."""
    name = _speaker(message)
    assert name is not None, "a chat's messages say who speaks"
    given = str(message[name]).strip().lower()
    if not given:
        raise _no_speaker(where)
    return _ROLES.get(given, given)


def _content(message: Mapping[str, Any], where: str) -> str:
    key = next((name for name in _WORDS if message.get(name) is not None), None)
    if key is None:
        key = next((name for name in _WORDS if name in message), None)
    if key is None:
        raise _no_text(where)
    text = text_of(message[key], where, f"`{key}`")
    if _role(message, where) == "user":
        check_text(text, f"{where}: `{key}`")
    else:
        check_text(text or "-", f"{where}: `{key}`")
    return text


def _part(part: Mapping[str, Any], where: str, what: str) -> str:
    kind = part["type"]
    if kind not in _TEXT_PARTS:
        raise UsageError(f"{where}: {what} has a part of type `{kind}`, and only text is read", _hint_for(part))
    return text_of(part.get("text"), where, f"a text part of {what}") if part.get("text") != "" else ""


def _no_speaker(where: str) -> EmptyPromptError:
    return EmptyPromptError(f"{where} does not say who speaks", "give it a role: user, assistant or system")


def _no_text(where: str) -> EmptyPromptError:
    return EmptyPromptError(f"{where} has neither `content` nor `value`", "give each message its text")


def _no_user(where: str) -> UsageError:
    return EmptyPromptError(
        f"{where}: no message is of the user", "a conversation has user or human messages to answer"
    )


def _hint_for(value: object) -> str:
    if value is None or value == []:
        return "fill it, leave out `empty=refuse`, or read another column ('FILE?column=NAME')"
    what = "leave the row out" if isinstance(value, dict) else "write it as text"
    return f"{what}, or read another column ('FILE?column=NAME')"


def given_answer(row: PromptRow) -> str:
    """The answer to a row's prompt, from a column such as `answer`.

    Raises:
        UsageError: it has none.
    """
    answer = _answer_column(row)
    if answer is None:
        raise _no_answer(row)
    return answer


def given_chat(row: PromptRow) -> list[dict[str, str]]:
    """The messages of a row's conversation up to its last answer.

    That is the assistant's last message, unless nothing comes before it, or the column `answer` and its like behind a
    conversation that the user ends.

    Raises:
        UsageError: no message is the assistant's and no column has an answer, or a message is no text.
    """
    messages, answer = _answered_messages(row), _answer_column(row)
    if answer is not None and len(messages) <= len(row.messages):
        messages = [*row.chat(), ChatMessage("assistant", answer).as_dict()]
    if not any(message["role"] == "assistant" and message["content"].strip() for message in messages[1:]):
        raise _no_answer(row)
    return messages


def _answered_messages(row: PromptRow) -> list[dict[str, str]]:
    """The messages of a column with a conversation up to the assistant's last; none without such a column."""
    where = f"row {row.index + 1}"
    values = (unwritten(row.values.get(name), where) for name in CHAT_COLUMNS)
    messages: list[dict[str, Any]] = next((value for value in values if is_chat(value)), [])
    answered = _chat_until("assistant", messages, where)
    if answered and row.messages and row.messages[0].role == "system" != answered[0].role:
        answered = (row.messages[0], *answered)
    return [message.as_dict() for message in answered]


def _answer_column(row: PromptRow) -> str | None:
    """The first text in a column of answers."""
    values = (row.values.get(name) for name in ANSWER_COLUMNS)
    return next((value for value in values if isinstance(value, str) and value.strip()), None)


def _no_answer(row: PromptRow) -> UsageError:
    columns = ", ".join(f"`{name}`" for name in ANSWER_COLUMNS)
    hint = f"end its messages with the assistant's (--chat), or fill one of {columns}"
    return UsageError(f"row {row.index + 1} has no answer to keep", hint)
