"""A request for a response becomes a request for a chat: items are turned into messages, and nothing else is new."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdec_cli.serve.errors import ApiError, bad_field
from specdec_cli.serve.protocol import (
    ChatCompletionRequest,
    FunctionCall,
    FunctionTool,
    GenerationBody,
    Message,
    MessageToolCall,
    NamedFunction,
    NamedTool,
    StreamOptions,
    TextPart,
    Tool,
)
from specdec_cli.serve.request.prepare import ModelInfo, Prepared, prepare_chat
from specdec_cli.serve.request.responses_protocol import (
    INCLUDE_LOGPROBS,
    InputItem,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
)

_NO_STORE = "this server stores no responses: send the earlier items in `input`"
_SHARED = frozenset(GenerationBody.model_fields) - {"stream_options", "n"}
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "text.format.json_schema.schema": "text.format.schema",
    "top_logprobs": "top_logprobs",
    "logprobs": "include",
    "tool_choice.function.name": "tool_choice.name",
}
"""Fields of a chat by the names that they have here."""
_OF_CHATS = {"messages": "input", "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"}
"""Fields that a request for a chat would have, and those to use here."""
_FIELD = re.compile(
    r"(?<![^`])(?:messages(?:\[(\d+)\])?(\.\w+)?|tools\[(\d+)\]\.function|("
    + "|".join(map(re.escape, _NAMES))
    + r")\b)"
)


def prepare_response(request: ResponsesRequest, model: ModelInfo, request_id: str, cache_salt: str = "") -> Prepared:
    """Jobs of `POST /v1/responses`; arguments as `prepare_completion`.

    Raises:
        ApiError: 404 for an unknown model, 400 naming the field.
    """
    _refuse_stored(request)
    turns = _read_input(request)
    chat = _as_chat(request, turns.messages)
    try:
        prepared = prepare_chat(chat, model, request_id, cache_salt)
    except ApiError as error:
        raise turns.renamed(error) from error
    constraint = prepared.constraint
    if constraint is not None:
        constraint = replace(constraint, param=turns.renamed_text(constraint.param))
    return replace(prepared, body=request, constraint=constraint)


def _refuse_stored(request: ResponsesRequest) -> None:
    if request.previous_response_id is not None:
        raise bad_field("previous_response_id", f"cannot be read: {_NO_STORE}", "previous_response_not_found")
    if request.conversation is not None:
        raise bad_field("conversation", f"cannot be read: {_NO_STORE}")
    if request.speculative is not None and request.speculative.details:
        raise bad_field("speculative.details", "is for chats and completions: events of a response do not hold it")


def _as_chat(request: ResponsesRequest, messages: list[Message]) -> ChatCompletionRequest:
    """Request in the form of the chat API."""
    changed: dict[str, Any] = {name: getattr(request, name) for name in request.model_fields_set & _SHARED}
    changed |= _unknown(request)
    changed["max_completion_tokens"] = request.max_output_tokens
    changed["tools"] = [_tool(tool) for tool in request.tools or ()] or None
    if isinstance(choice := request.tool_choice, ResponseToolChoice):
        changed["tool_choice"] = NamedTool(type="function", function=NamedFunction(name=choice.name))
    elif choice is not None:
        changed["tool_choice"] = choice
    if request.include and INCLUDE_LOGPROBS in request.include:
        changed["logprobs"] = True
    elif request.top_logprobs:
        raise bad_field("top_logprobs", f'needs `include: ["{INCLUDE_LOGPROBS}"]`')
    if request.reasoning is not None:
        changed["reasoning_effort"] = request.reasoning.effort
    if request.stream:
        changed["stream_options"] = StreamOptions(include_usage=True)
    for name in ("parallel_tool_calls", "top_logprobs", "include_reasoning", "chat_template_kwargs"):
        changed[name] = getattr(request, name)
    return ChatCompletionRequest(messages=messages).model_copy(update=changed)


def _unknown(request: ResponsesRequest) -> dict[str, Any]:
    """Fields that no API here has, for the chat path to look through.

    Raises:
        ApiError: 400 naming a chat's field, which would be left out or change the chat unread.
    """
    extra = request.model_extra or {}
    others = {name for name in extra if name in ChatCompletionRequest.model_fields}
    for name in sorted(others - GenerationBody.model_fields.keys()):
        if extra[name]:
            raise bad_field(name, f"is not read here: use `{_OF_CHATS.get(name, '/v1/chat/completions')}`")
    return {name: value for name, value in extra.items() if name not in others}


def _tool(tool: ResponseTool) -> Tool:
    function = FunctionTool(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


@dataclass(slots=True)
class Turns:
    """Messages, and the field of the request that each was read from.

    Args:
        messages: as the chat path takes them.
        places: the field of each message.
        calls: the field of the first call of a message that has any.
    """

    messages: list[Message] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    calls: dict[int, str] = field(default_factory=dict)

    def add(self, message: Message, place: str) -> None:
        """Append a message."""
        self.messages.append(message)
        self.places.append(place)

    def assistant(self, place: str, is_free: str) -> Message:
        """The assistant's open turn if its field `is_free` is still empty, else a new turn."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last.role == "assistant" and not getattr(last, is_free) and not self._is_past(is_free):
            return last
        message = Message(role="assistant")
        self.add(message, place)
        return message

    def _is_past(self, is_free: str) -> bool:
        """Whether the last turn holds something that comes after such a field."""
        last = self.messages[-1]
        has_text = last.content is not None
        return bool(last.tool_calls) or (is_free == "reasoning_content" and has_text)

    def call(self, item: InputItem, place: str) -> None:
        """Append a call to the assistant's turn."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant":
            last = Message(role="assistant")
            self.add(last, place)
        self.calls.setdefault(len(self.messages) - 1, place)
        function = FunctionCall(name=item.name or "", arguments=item.arguments)
        calls = last.tool_calls or []
        last.tool_calls = [*calls, MessageToolCall(id=item.call_id, function=function)]

    def renamed(self, error: ApiError) -> ApiError:
        """An error of the chat path, with the fields that this API has."""
        param = None if error.param is None else self.renamed_text(error.param)
        message = self.renamed_text(error.message)
        return ApiError(
            error.status, message, param=param, code=error.code, type=error.type, headers=dict(error.headers)
        )

    def renamed_text(self, text: str) -> str:
        """A field of the chat path, or a text that names some, with the fields that this API has."""

        def name(match: re.Match[str]) -> str:
            index, rest, tool, other = match.groups()
            if other is not None:
                return _NAMES[other]
            if tool is not None:
                return f"tools[{tool}]"
            if index is None:
                return "input"
            message, place = self.messages[int(index)], self.places[int(index)]
            if not place.startswith("input["):
                return place
            if rest == ".tool_calls":
                return self.calls.get(int(index), place)
            return f"{place}.output" if message.role == "tool" and rest == ".content" else f"{place}{rest or ''}"

        return _FIELD.sub(name, text)


def _read_input(request: ResponsesRequest) -> Turns:
    """The conversation.

    Raises:
        ApiError: 400 naming an item that lacks a field.
    """
    turns = Turns()
    if request.instructions is not None:
        turns.add(Message(role="system", content=request.instructions), "instructions")
    if isinstance(request.input, str):
        turns.add(Message(role="user", content=request.input), "input")
        return turns
    if not request.input:
        raise bad_field("input", "has no items")
    for i, item in enumerate(request.input):
        _read_item(item, f"input[{i}]", turns)
    return turns


def _read_item(item: InputItem, place: str, turns: Turns) -> None:
    if item.type == "reasoning":
        turns.assistant(place, "reasoning_content").reasoning_content = _joined(item.content or item.summary)
    elif item.type == "function_call":
        _check(item, place, "call_id", "name", "arguments")
        turns.call(item, place)
    elif item.type == "function_call_output":
        _check(item, place, "call_id", "output")
        turns.add(Message(role="tool", tool_call_id=item.call_id, content=_content(item.output)), place)
    else:
        _check(item, place, "role", "content")
        if item.role == "assistant":
            turns.assistant(place, "content").content = _content(item.content)
        else:
            assert item.role is not None, "a message without a role was refused"
            turns.add(Message(role=item.role, content=_content(item.content)), place)


def _check(item: InputItem, place: str, *names: str) -> None:
    missing = next((name for name in names if getattr(item, name) is None), None)
    if missing is not None:
        raise bad_field(f"{place}.{missing}", "is missing")


def _content(content: str | Sequence[TextPart] | None) -> str | list[TextPart] | None:
    return content if content is None or isinstance(content, str) else list(content)


def _joined(content: str | Sequence[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or ())
