"""A conversation of a request becomes token ids: messages as the chat template wants them, text parts only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec_cli.errors import UsageError
from specdec_cli.serve.errors import as_api_error, bad_field
from specdec_cli.serve.protocol import Message, MessageToolCall, TextPart, Tool

if TYPE_CHECKING:
    from specdec_cli.text.tokenizer import Tokenizer

_TEMPLATE_ARGUMENTS = {"conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"}
_TEMPLATE_ARGUMENTS |= {"continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"}
_TEMPLATE_ARGUMENTS |= {"return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template is given.

    Args:
        messages: the turns, oldest first.
        tools: functions that the model may call.
        add_generation_prompt: end with the head of the assistant's turn; None does unless the last turn goes on.
        continue_final_message: the model goes on with the last turn.
        variables: `chat_template_kwargs`.
        reasoning_effort: a variable of some templates.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    variables: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids by the template.

        Raises:
            ApiError: 400 naming the field: a part that is no text, a variable that the template does not read, tools
                or messages that it refuses.
        """
        template = tokenizer.chat_template
        if self.tools and "tools" not in template:
            raise bad_field("tools", "cannot be used: the model's chat template knows no tools")
        goes_on = self.continue_final_message
        try:
            return tokenizer.chat(
                [_turn(message, f"messages[{i}]", template) for i, message in enumerate(self.messages)],
                not goes_on if self.add_generation_prompt is None else self.add_generation_prompt,
                tools=[tool.model_dump(exclude_none=True) for tool in self.tools] or None,
                continue_final_message=goes_on,
                variables=self._read_variables(template),
            )
        except UsageError as error:
            raise as_api_error(error, "messages") from error

    def _read_variables(self, template: str) -> dict[str, Any]:
        found = dict(self.variables or {})
        for name in found:
            where = f"chat_template_kwargs.{name}"
            if name in _TEMPLATE_ARGUMENTS:
                raise bad_field(where, "is no variable of a template; the request has a field for it")
            if name not in template:
                raise bad_field(where, "is not read by the model's chat template")
        if self.reasoning_effort is not None:
            if "reasoning_effort" not in template:
                raise bad_field("reasoning_effort", "is not read by the model's chat template")
            found["reasoning_effort"] = self.reasoning_effort
        return found


def text_of(content: str | Sequence[TextPart] | None, where: str) -> str | None:
    """The text of a message's content; its parts are lines.

    Raises:
        ApiError: 400 for a part that is no text.
    """
    if content is None or isinstance(content, str):
        return content
    lines = []
    for i, part in enumerate(content):
        name = part.type if part.type == "refusal" else "text"
        if part.type not in ("text", "refusal", "input_text", "output_text"):
            raise bad_field(f"{where}[{i}].type", f"must be `text`, not `{part.type[:50]}`: this model reads text only")
        line = part.refusal if name == "refusal" else part.text
        if line is None:
            raise bad_field(f"{where}[{i}].{name}", "is missing")
        lines.append(line)
    return "\n".join(lines)


def _turn(message: Message, where: str, template: str) -> dict[str, Any]:
    """A message as templates read it."""
    content = text_of(message.content, f"{where}.content")
    if content is None:
        if message.role not in ("assistant", "tool", "function"):
            raise bad_field(f"{where}.content", "is missing")
        content = message.refusal or ""
    role = "system" if message.role == "developer" and "developer" not in template else message.role
    turn: dict[str, Any] = {"role": role, "content": content}
    reasoning_field = "reasoning" if message.reasoning_content is None else "reasoning_content"
    reasoning = message.reasoning_content or message.reasoning
    for field, given, read in (
        ("tool_calls", message.tool_calls, "tool_calls"),
        (reasoning_field, reasoning, "reasoning_content"),
    ):
        if given and read not in template:
            raise bad_field(f"{where}.{field}", "is not read by the model's chat template")
    if message.tool_calls:
        turn["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}].function.arguments") for i, call in enumerate(message.tool_calls)
        ]
    known = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    return turn | {name: value for name, value in known.items() if value is not None}


def _call(call: MessageToolCall, where: str) -> dict[str, Any]:
    """An earlier call; templates want its arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_field(where, "must be a JSON object written as a string")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
