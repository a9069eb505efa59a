"""A conversation of a request becomes token ids: messages as the chat template wants them, text parts only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from specdec_cli.errors import UsageError
from specdec_cli.serve.errors import as_api_error, bad_field
from specdec_cli.serve.protocol import Message, TemplateFields, TextPart, Tool
from specdec_cli.serve.request.history import CallWriter, call_writers
from specdec_cli.serve.request.prompts import encode_text
from specdec_cli.text.chat_template import TEMPLATE_ARGUMENTS

if TYPE_CHECKING:
    from specdec_cli.serve.request.prepare import ModelInfo
    from specdec_cli.text.template import TemplateReads
    from specdec_cli.text.tokenizer import Tokenizer

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates read what an assistant thought."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The variables passed to a chat template.

    Args:
        messages: the turns, oldest first.
        fields: of the request. Without `add_generation_prompt`, a text ends with the head of the assistant's turn
            unless the model goes on with the last turn.
        tools: functions that the model may call.
        reasoning_effort: a variable of some templates.
    """

    messages: Sequence[Message]
    fields: TemplateFields
    tools: Sequence[Tool] = ()
    reasoning_effort: str | None = None

    def encode(self, model: ModelInfo, truncate_to: int | None = None) -> tuple[int, ...]:
        """Token ids by the template.

        Args:
            model: the served model.
            truncate_to: how many of the last tokens are kept; None keeps all.

        Raises:
            ApiError: 400 naming the field: a part that is no text, a variable that the template does not read, tools
                or messages that it refuses, a text that is far too long.
        """
        tokenizer = model.tokenizer
        if tokenizer is None:
            raise bad_field("messages", "cannot be read: the model has no tokenizer")
        try:
            reads = tokenizer.template_reads(bool(self.tools))
            if self.tools and "tools" not in reads.variables:
                raise bad_field("tools", "cannot be used: the model's chat template reads no tools")
            variables = self._read_variables(reads)
            text = self._render(tokenizer, reads, variables, model.tool_call_format)
        except UsageError as error:
            raise as_api_error(error, "messages") from error
        return encode_text(text, "messages", model, add_special_tokens=False, truncate_to=truncate_to)

    def _render(
        self, tokenizer: Tokenizer, reads: TemplateReads, variables: Mapping[str, Any], form: str | None
    ) -> str:
        """The conversation as text, with earlier calls in the first of the forms that the template takes."""
        goes_on, has_head = self.fields.continue_final_message is True, self.fields.add_generation_prompt
        refused: UsageError | None = None
        for writer in self._writers(tokenizer, reads, form):
            try:
                turns = (_turns(message, f"messages[{i}]", reads, writer) for i, message in enumerate(self.messages))
                return tokenizer.render_chat(
                    list(chain.from_iterable(turns)),
                    not goes_on if has_head is None else has_head,
                    tools=[tool.model_dump(exclude_none=True) for tool in self.tools] or None,
                    continue_final_message=goes_on,
                    variables=variables,
                )
            except UsageError as error:
                refused = refused or error
        assert refused is not None, "a conversation is written in at least one form"
        raise refused

    def _writers(self, tokenizer: Tokenizer, reads: TemplateReads, form: str | None) -> Sequence[CallWriter]:
        """Ways to give the template its earlier calls, best first."""
        if not any(message.tool_calls or message.tool_call_id for message in self.messages):
            return (CallWriter(),)
        if reads.has_field("tool_calls"):
            return call_writers(tokenizer, tokenizer.chat_template, form)
        return (CallWriter(form=form),)

    def _read_variables(self, reads: TemplateReads) -> dict[str, Any]:
        variables = dict(self.fields.chat_template_kwargs or {})
        for name in variables:
            where = f"chat_template_kwargs.{name}"
            if name in TEMPLATE_ARGUMENTS:
                raise bad_field(where, "is not a variable of a template; the request has a field for it")
            if name not in reads.variables:
                raise bad_field(where, "is not read by the model's chat template")
        if self.reasoning_effort is not None:
            if "reasoning_effort" not in reads.variables:
                raise bad_field("reasoning_effort", "is not read by the model's chat template")
            variables["reasoning_effort"] = self.reasoning_effort
        return variables


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


def _turns(message: Message, where: str, reads: TemplateReads, writer: CallWriter) -> list[dict[str, Any]]:
    """A message as templates read it: one turn, or one for each of its calls."""
    content = text_of(message.content, f"{where}.content")
    if content is None:
        if message.role not in ("assistant", "tool", "function"):
            raise bad_field(f"{where}.content", "is missing")
        content = message.refusal or ""
    role = "system" if message.role == "developer" and "developer" not in reads.texts else message.role
    turn: dict[str, Any] = {"role": role, "content": content}
    if message.tool_call_id is not None:
        turn["tool_call_id"] = writer.id_of(message.tool_call_id)
    if message.name is not None:
        turn["name"] = message.name
    turn |= _reasoning(message, where, reads)
    if not message.tool_calls:
        return [turn]
    if writer.form is None and not reads.has_field("tool_calls"):
        raise bad_field(f"{where}.tool_calls", "is not read by the model's chat template")
    return writer.turns(turn, message.tool_calls)


def _reasoning(message: Message, where: str, reads: TemplateReads) -> dict[str, str]:
    """The assistant's reasoning, under the names that the template reads."""
    field = "reasoning" if message.reasoning_content is None else "reasoning_content"
    thought = message.reasoning_content or message.reasoning
    if not thought:
        return {} if thought is None else {"reasoning_content": thought}
    names = [name for name in _REASONING if reads.has_field(name)]
    if not names:
        raise bad_field(f"{where}.{field}", "is not read by the model's chat template")
    return dict.fromkeys(names, thought)
