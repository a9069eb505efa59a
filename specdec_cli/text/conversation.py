"""Conversations in OpenAI's form as a chat template reads them: text instead of parts, and calls in its own form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from specdec_cli.errors import UsageError
from specdec_cli.text.call_history import CallForm, CallWriter, call_writers

if TYPE_CHECKING:
    from specdec_cli.text.template import TemplateReads
    from specdec_cli.text.tokenizer import Tokenizer

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates read what an assistant thought."""
_READ_HERE = ("role", "content", "refusal", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
_TEXT_PARTS = ("text", "refusal", "input_text", "output_text")
_A_PART = 'must be a part such as {"type": "text", "text": "Hi"}'
_A_CALL = 'must be a call such as {"type": "function", "function": {"name": "f", "arguments": "{}"}}'


class MessageError(UsageError):
    """A field of a conversation that is missing, of the wrong kind, or not read by the template.

    Args:
        field: its path, such as `messages[0].content`.
        reason: what is wrong, as it goes on behind the field's name.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"`{field}` {reason}")
        self.field = field
        self.reason = reason


def render_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    call_form: CallForm | None = None,
) -> str:
    """Text of a conversation, with earlier calls in the first of the forms that the template takes.

    Args:
        tokenizer: has the template.
        messages: as OpenAI's API has them; fields that it does not know are passed on to the template.
        add_generation_prompt: end with the head of the assistant's turn.
        tools: functions that the model may call.
        continue_final_message: leave the last turn open.
        variables: further names that the template reads.
        call_form: of the model's calls, for a template that ignores them; None if unknown.

    Raises:
        MessageError: a part that is no text, a missing field, tools or calls that the template does not read.
        UsageError: there is no template, or it refuses the messages.
    """
    reads = tokenizer.template_reads(bool(tools))
    if tools and "tools" not in reads.variables:
        raise MessageError("tools", "cannot be used: the model's chat template reads no tools")
    refused: UsageError | None = None
    for writer in _writers(tokenizer, messages, reads, call_form):
        try:
            turns = (_turns(message, f"messages[{i}]", reads, writer) for i, message in enumerate(messages))
            return tokenizer.render_chat(
                list(chain.from_iterable(turns)),
                add_generation_prompt,
                tools=[_tool(tool) for tool in tools] if tools else None,
                continue_final_message=continue_final_message,
                variables=variables,
            )
        except UsageError as error:
            refused = refused or error
    assert refused is not None, "a conversation is written in at least one form"
    raise refused


def text_of(content: Any, where: str) -> str | None:
    """The text of a message's content; its parts are lines.

    Raises:
        MessageError: a part that is no text.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise MessageError(where, "must be text or a list of parts")
    return "\n".join(_line(part, f"{where}[{i}]") for i, part in enumerate(content))


def _line(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise MessageError(where, _A_PART)
    if kind not in _TEXT_PARTS:
        raise MessageError(f"{where}.type", f"must be `text`, not `{kind[:50]}`: this model reads text only")
    name = "refusal" if kind == "refusal" else "text"
    line = part.get(name)
    if line is None:
        raise MessageError(f"{where}.{name}", "is missing")
    if not isinstance(line, str):
        raise MessageError(f"{where}.{name}", "must be text")
    return line


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function as templates know it: with a description and parameters; `strict` is for the server."""
    declared = tool.get("function")
    if not isinstance(declared, Mapping):
        return dict(tool)
    given = {name: value for name, value in declared.items() if name != "strict" and value is not None}
    return {**tool, "function": {"name": "", "description": "", "parameters": {}, **given}}


def _writers(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], reads: TemplateReads, form: CallForm | None
) -> Sequence[CallWriter]:
    """Ways to give the template its earlier calls, best first."""
    if not any(message.get("tool_calls") or message.get("tool_call_id") for message in messages):
        return (CallWriter(),)
    if reads.has_field("tool_calls"):
        return call_writers(tokenizer, tokenizer.chat_template, form)
    return (CallWriter(form=form),)


def _turns(message: Mapping[str, Any], where: str, reads: TemplateReads, writer: CallWriter) -> list[dict[str, Any]]:
    """A message as templates read it: one turn, or one for each of its calls."""
    role, content = message["role"], text_of(message.get("content"), f"{where}.content")
    if content is None:
        if role not in ("assistant", "tool", "function"):
            raise MessageError(f"{where}.content", "is missing")
        content = message.get("refusal") or ""
    if role == "developer" and "developer" not in reads.texts:
        role = "system"
    turn: dict[str, Any] = {"role": role, "content": content}
    if (call_id := message.get("tool_call_id")) is not None:
        turn["tool_call_id"] = writer.id_of(str(call_id))
    turn |= {name: value for name, value in message.items() if name not in _READ_HERE}
    turn |= _reasoning(message, where, reads)
    calls = message.get("tool_calls")
    if not calls:
        return [turn]
    if writer.form is None and not reads.has_field("tool_calls"):
        raise MessageError(f"{where}.tool_calls", "is not read by the model's chat template")
    _check_calls(calls, f"{where}.tool_calls")
    return writer.turns(turn, calls)


def _check_calls(calls: Any, where: str) -> None:
    """Refuse calls that are not in OpenAI's form.

    Raises:
        MessageError: the first that is not.
    """
    if not isinstance(calls, list | tuple):
        raise MessageError(where, "must be a list of calls")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name", ""), str):
            raise MessageError(f"{where}[{i}]", _A_CALL)
        try:
            json.dumps(function.get("arguments"))
        except (TypeError, ValueError, RecursionError) as error:
            raise MessageError(f"{where}[{i}].function.arguments", "must be a JSON object, or its text") from error


def _reasoning(message: Mapping[str, Any], where: str, reads: TemplateReads) -> dict[str, str]:
    """The assistant's reasoning, under the names that the template reads."""
    field = "reasoning" if message.get("reasoning_content") is None else "reasoning_content"
    thought = message.get("reasoning_content") or message.get("reasoning")
    if not thought:
        return {} if thought is None else {"reasoning_content": thought}
    names = [name for name in _REASONING if reads.has_field(name)]
    if not names:
        raise MessageError(f"{where}.{field}", "is not read by the model's chat template")
    return dict.fromkeys(names, thought)
