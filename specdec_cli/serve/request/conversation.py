"""A conversation of a request becomes token ids: messages as the chat template wants them, text parts only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec_cli.errors import UsageError
from specdec_cli.serve.errors import as_api_error, bad_field
from specdec_cli.serve.protocol import Message, TemplateFields, TextPart, Tool
from specdec_cli.serve.request.prompts import encode_text
from specdec_cli.serve.tools.formats import FORMATS
from specdec_cli.text import conversation
from specdec_cli.text.chat_template import TEMPLATE_ARGUMENTS

if TYPE_CHECKING:
    from specdec_cli.serve.request.prepare import ModelInfo
    from specdec_cli.text.template import TemplateReads
    from specdec_cli.text.tokenizer import Tokenizer

_FIELDS = set(Message.model_fields)


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
            text = self._render(tokenizer, model.tool_call_format)
        except conversation.MessageError as error:
            raise bad_field(error.field, error.reason) from error
        except UsageError as error:
            raise as_api_error(error, "messages") from error
        return encode_text(text, "messages", model, add_special_tokens=False, truncate_to=truncate_to)

    def _render(self, tokenizer: Tokenizer, form: str | None) -> str:
        goes_on, has_head = self.fields.continue_final_message is True, self.fields.add_generation_prompt
        return conversation.render_conversation(
            tokenizer,
            [message.model_dump(include=_FIELDS, exclude_none=True) for message in self.messages],
            not goes_on if has_head is None else has_head,
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools],
            continue_final_message=goes_on,
            variables=self._read_variables(tokenizer.template_reads(bool(self.tools))),
            call_form=None if form is None else FORMATS[form],
        )

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
    """The text of a request's content; its parts are lines.

    Raises:
        ApiError: 400 for a part that is no text.
    """
    parts = content if content is None or isinstance(content, str) else [part.model_dump() for part in content]
    try:
        return conversation.text_of(parts, where)
    except conversation.MessageError as error:
        raise bad_field(error.field, error.reason) from error
