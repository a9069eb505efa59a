"""The bodies of requests: OpenAI's fields and the extras of vLLM and llama-server, typed strictly.

A field is here because it works, or because it is neutral at the value that its type allows; what a server of one
model cannot do has the type of its neutral value and is refused by name otherwise. Fields that are not here are
collected and reported, never dropped in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, create_model
from pydantic_core import PydanticCustomError

from specdec_cli.recipe.keys import describe
from specdec_cli.recipe.schema import Sampling, Serve

Token = Annotated[int, Field(ge=0, lt=2**31)]
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list that reports its first wrong item, not a million of them."""
TOO_MANY = "too_many"
"""Pydantic's type of the error for a list that is too long: its message stands alone."""


@dataclass
class ListLengths:
    """Bounds of a body's lists, checked before their items become models, which for a hundred thousand takes seconds.

    Args:
        limits: the server's.
        num_parts: parts and calls of messages so far: lists inside of lists are bounded together.
    """

    limits: Serve
    num_parts: int = 0


def _at_most(setting: str, unit: str, of: type | tuple[type, ...] = object) -> BeforeValidator:
    """Refuses a list or object longer than the server's limit, if its first item is one of `of`."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if isinstance(info.context, ListLengths) and isinstance(value, list | dict):
            limit = getattr(info.context.limits, setting)
            if len(value) > limit and isinstance(next(iter(value)), of):
                raise _too_many(len(value), unit, limit)
        return value

    return BeforeValidator(check)


def _count_parts(value: Any, info: ValidationInfo) -> Any:
    if isinstance(info.context, ListLengths) and isinstance(value, list):
        info.context.num_parts += len(value)
        most = info.context.limits.max_message_parts
        if info.context.num_parts > most:
            raise _too_many(len(value), "entries", f"{most} in all such lists of a request")
    return value


def _too_many(count: int, unit: str, limit: int | str) -> PydanticCustomError:
    message = "has `{count}` {unit}, and at most {limit} are taken"
    return PydanticCustomError(TOO_MANY, message, {"count": count, "unit": unit, "limit": limit})


Parts = Annotated[Items[Item], BeforeValidator(_count_parts)]
"""A list inside of a list, such as a message's parts."""
Turns = Annotated[Items[Item], _at_most("max_messages", "turns")]
Tools = Annotated[Items[Item], _at_most("max_tools", "entries")]
Unused = Literal[None]
"""The type of a known field that only `null` leaves neutral here."""


class Body(BaseModel):
    """Strict types, finite numbers; unknown fields are kept aside to be reported."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, populate_by_name=False)

    def ignored(self) -> list[str]:
        """Paths of the fields that nothing here knows."""
        return _unknown("", self)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculative(Body):
    """How this request speculates; absent fields take the server's."""

    enabled: bool | None = None
    num_speculative_tokens: int | None = Field(None, ge=0)
    tree: str | None = Field(
        None, description="shape of the drafted trees: children per depth (4,2,1) or dynamic:N; null drafts chains"
    )
    draft: str | None = None
    details: bool | None = Field(None, description="say in each streamed choice which tokens were drafted")


Schema = dict[str, Any] | bool | str
"""A JSON schema, or its text."""


class JsonSchemaFormat(Body):
    """The schema of `response_format: {type: json_schema}`."""

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class NamedRegex(Body):
    """A regular expression as Perplexity's API nests it."""

    regex: str


class ResponseFormat(JsonSchemaFormat):
    """The form of the text: OpenAI's, and what other servers put into the same place."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "regex_schema", "grammar", "ebnf"]
    json_schema: JsonSchemaFormat | None = None
    value: Any = Field(None, description="TGI's: a schema or a regular expression")
    regex: str | NamedRegex | None = None
    regex_schema: str | None = None
    grammar: str | None = None
    ebnf: str | None = None


class TextOptions(Body):
    """The field `text` of OpenAI's Responses."""

    format: ResponseFormat | None = None
    verbosity: Literal["medium"] | None = None


class StructuredOutputs(Body):
    """vLLM's way to say what the text must match: one of these."""

    json_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Unused = None
    whitespace_pattern: Unused = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None


class TextPart(Body):
    """One piece of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class PredictionContent(Body):
    """Text that the output is expected to follow, for the drafter `prediction`."""

    type: Literal["content"]
    content: str | Parts[TextPart]


class FunctionCall(Body):
    """A call inside an earlier assistant's message; arguments are JSON as a string, whole or cut."""

    name: str = ""
    arguments: Any = None


class MessageToolCall(Body):
    """A tool call inside an earlier assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Parts[TextPart] | None = None
    name: str | None = None
    tool_calls: Parts[MessageToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Unused = None
    audio: Unused = None


_PLAIN_OBJECT = {"type", "properties", "required", "title", "description", "$schema", "$id", "$defs", "definitions"}
"""Keywords of a schema whose properties are all that it allows, once `additionalProperties` is false."""

_COMBINED = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "const", "enum"}
"""Keywords whose schemas say themselves what type they allow."""


class FunctionTool(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """Schema that enforced arguments follow: an object with the properties that `parameters` lists, and no other.

        A schema with keywords beside them that say more holds as it is.
        """
        schema = self.parameters or {}
        properties: Any = schema.get("properties", {})
        required: Any = schema.get("required", [])
        is_listed = isinstance(properties, dict) and isinstance(required, list) and set(schema) <= _PLAIN_OBJECT
        if is_listed and all(name in properties for name in required):
            return {"properties": {}, **schema, "type": "object", "additionalProperties": False}
        return schema if set(schema) & _COMBINED else {**schema, "type": "object"}


def allows_objects(schema: object) -> bool:
    """Whether a JSON schema's own keywords leave room for an object; a reference may lead to one."""
    if not isinstance(schema, dict):
        return schema is not False
    allowed = schema.get("type", "object")
    kinds = allowed if isinstance(allowed, list) else [allowed]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if "object" not in kinds or (isinstance(values, list) and not any(isinstance(value, dict) for value in values)):
        return False
    parts = {name: part for name in ("allOf", "anyOf", "oneOf") if isinstance(part := schema.get(name), list)}
    return all((all if name == "allOf" else any)(map(allows_objects, part)) for name, part in parts.items())


class Tool(Body):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: FunctionTool


class TemplateFields(Body):
    """Fields that a chat template reads beside the messages."""

    tools: Tools[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Unused = None
    mm_processor_kwargs: Unused = None


class NamedFunction(Body):
    """The name in a named tool choice."""

    name: str


class NamedTool(Body):
    """A tool choice that names its function."""

    type: Literal["function"]
    function: NamedFunction


_IN_OTHER_FORM = {
    *("max_new_tokens", "top_k", "logit_bias", "stop", "stop_token_ids", "min_tokens", "seed", "logprobs"),
    "skip_special_tokens",
}
"""Keys of the recipe's section `sampling` that requests spell or bound in another way."""
_OWN_RANGES = {
    "temperature": Field(ge=0, le=100),
    "presence_penalty": Field(ge=-2, le=2),
    "frequency_penalty": Field(ge=-2, le=2),
}
"""OpenAI's, where they are narrower than the recipe's."""
SAMPLING_FIELDS = tuple(name for name in Sampling.model_fields if name not in _IN_OTHER_FORM)
"""Fields that requests have as the recipe declares them."""


def _sampling_field(name: str) -> tuple[Any, Any]:
    """A key of the recipe's section `sampling` as a field of a request, which may leave it out."""
    declared = Sampling.model_fields[name]
    metadata = _OWN_RANGES[name].metadata if name in _OWN_RANGES else declared.metadata
    kind: Any = declared.annotation
    for constraint in metadata:
        kind = Annotated[kind, constraint]
    return kind | None, Field(None, description=describe(f"sampling.{name}"))


if TYPE_CHECKING:
    SamplingBody = Body
else:
    SamplingBody = create_model(
        "SamplingBody", __base__=Body, **{name: _sampling_field(name) for name in SAMPLING_FIELDS}
    )


class GenerationBody(SamplingBody):
    """Fields that completions and chat completions share."""

    model: str | None = None
    # Sampling
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="-1 and 0 keep every token")
    logit_bias: Annotated[dict[str, float], _at_most("max_logit_bias", "entries")] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="a negative one is drawn at random")
    n: int | None = Field(None, ge=1)
    # Ends
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int | None = Field(None, ge=0)
    stop: str | Annotated[Items[str], _at_most("max_stop", "strings", of=str)] | None = None
    stop_token_ids: Annotated[Items[Token], _at_most("max_stop", "tokens", of=int)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=1, description="keep the last so many tokens of the prompt")
    # The answer's form
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_spec_tokens_details: bool | None = Field(None, description="report acceptance in SGLang's `sglext`, too")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: Unused = None
    json_schema: Schema | None = Field(None, description="a JSON schema, or its text")
    schema_: Schema | None = Field(None, alias="schema", description="a JSON schema, or its text")
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | ResponseFormat | None = Field(None, description="a grammar's text, or an object {type, value}")
    grammar_string: str | None = None
    regex_pattern: str | None = None
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="`json` or a JSON schema")
    text: TextOptions | None = None
    grammar_lazy: Literal[False] | None = None
    grammar_triggers: Annotated[list[Any], Field(max_length=0)] | None = None
    structural_tag: Unused = None
    # Speculation
    speculative: Speculative | None = None
    prediction: PredictionContent | None = None
    speculative_n_max: int | None = Field(None, ge=0, alias="speculative.n_max")
    speculative_n_min: Literal[0] | None = Field(None, alias="speculative.n_min")
    speculative_p_min: Annotated[float, Field(ge=0, le=0)] | None = Field(None, alias="speculative.p_min")
    # Of no effect on the text, whatever the value
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    request_id: str | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    # Known, and neutral only at these values
    use_beam_search: Literal[False] | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    early_stopping: Literal[False] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    priority: Literal[0] | None = None
    bad_words: Annotated[list[str], Field(max_length=0)] | None = None
    allowed_token_ids: Unused = None
    prompt_logprobs: Unused = None
    logits_processors: Unused = None
    kv_transfer_params: Unused = None
    vllm_xargs: Unused = None


Prompt = Annotated[
    str | Items[str] | Items[Token] | Items[Items[Token]], _at_most("max_choices", "prompts", of=(str, list))
]


class CompletionRequest(GenerationBody):
    """The body of `POST /v1/completions`."""

    prompt: Prompt = Field(description="a string, a list of strings, token ids, or a list of lists of token ids")
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0)
    best_of: int | None = Field(None, ge=1)
    suffix: Literal[""] | None = None
    add_special_tokens: bool | None = None
    prompt_embeds: Unused = None


class ChatCompletionRequest(GenerationBody, TemplateFields):
    """The body of `POST /v1/chat/completions`."""

    messages: Turns[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    # Known, and neutral only at these values
    add_special_tokens: Literal[False] | None = None
    echo: Literal[False] | None = None
    verbosity: Literal["medium"] | None = None
    modalities: Items[Literal["text"]] | None = None
    audio: Unused = None
    web_search_options: Unused = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none"] | None = None
    documents: Annotated[list[Any], Field(max_length=0)] | None = None
    media_io_kwargs: Unused = None


class TokenizeRequest(TemplateFields):
    """The body of `POST /tokenize`: a prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Turns[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: Items[Token]


AnyBody = TypeVar("AnyBody", bound=Body)


def _unknown(prefix: str, value: object) -> list[str]:
    if isinstance(value, Body):
        paths = [f"{prefix}{name}" for name in value.model_extra or ()]
        for name in value.model_fields_set - set(value.model_extra or ()):
            paths += _unknown(f"{prefix}{name}.", getattr(value, name))
        return sorted(paths)
    if isinstance(value, list) and value and isinstance(value[0], Body):
        return [path for i, item in enumerate(value) for path in _unknown(f"{prefix[:-1]}[{i}].", item)]
    return []
