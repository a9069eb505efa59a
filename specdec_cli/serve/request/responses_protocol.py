"""The body of `POST /v1/responses`, OpenAI's API for items instead of messages, typed as strictly as the others."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specdec_cli.serve.protocol import (
    Body,
    GenerationBody,
    Parts,
    StreamOptions,
    TextPart,
    Tools,
    Turns,
    Unused,
)

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED = "reasoning.encrypted_content"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Results of hosted tools and of pictures, which this server does not have
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsePart(TextPart):
    """One piece of an item's content; `annotations` and `logprobs` come back with the items of earlier answers."""

    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(Body):
    """One item of the conversation: a message, a call, the result of a call, or earlier reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    # A message
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Parts[ResponsePart] | None = None
    phase: str | None = None
    # A call and its result
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Parts[ResponsePart] | None = None
    # Reasoning
    summary: Parts[ResponsePart] | None = None
    encrypted_content: Unused = None


class ResponseTool(Body):
    """A function that the model may call; hosted tools do not exist here."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(Body):
    """A tool choice that names its function."""

    type: Literal["function"]
    name: str


class ReasoningOptions(Body):
    """How much the model is to think."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(StreamOptions):
    """Options of a stream; its last event always holds the usage."""

    include_usage: Literal[True] | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(GenerationBody):
    """The body of `POST /v1/responses`."""

    input: str | Turns[InputItem] = Field(description="a string or a list of items")
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Tools[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include_reasoning: bool | None = None
    include: Parts[Includable] | None = None
    top_logprobs: int | None = Field(None, ge=0)
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: ResponseStreamOptions | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    # Of no effect on the text, whatever the value
    max_tool_calls: int | None = Field(None, description="counts calls of hosted tools, of which there are none")
    prompt_cache_options: dict[str, Any] | None = None
    # Known, and neutral only at these values
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    prompt: Unused = None
    context_management: Unused = None
    moderation: Unused = None
    n: Literal[1] | None = None
    max_tokens: Unused = None
    response_format: Unused = None
    return_token_ids: Literal[False] | None = None
    return_spec_tokens_details: Literal[False] | None = None

    def ignored(self) -> list[str]:
        """Paths of unknown fields, and of `reasoning.encrypted_content`: reasoning items hold plain text here."""
        encrypted = [f"include[{i}]" for i, name in enumerate(self.include or ()) if name == INCLUDE_ENCRYPTED]
        return [*super().ignored(), *encrypted]
