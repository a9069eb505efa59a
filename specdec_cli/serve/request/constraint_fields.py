"""The fields that say what a text must match, under the names of every server that clients were written for.

| names | of |
|---|---|
| `response_format` {json_object, json_schema} | OpenAI |
| the same with `schema`, `value`, `regex`, `grammar`, `ebnf` in it | llama.cpp, TGI, TensorRT-LLM, Fireworks |
| `structured_outputs`, `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`, `guided_json_object` | vLLM |
| `json_schema`, `grammar` | llama-server |
| `json_schema`, `regex`, `ebnf` | SGLang |
| `grammar` {type, value} | TGI |
| `schema`, `regex_pattern`, `grammar_string` | llama-cpp-python, TabbyAPI, text-generation-webui |
| `format` | Ollama |
| `text.format` | OpenAI's Responses |
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from specdec_cli.serve.constraint import Constraint, Kind
from specdec_cli.serve.errors import bad_field
from specdec_cli.serve.protocol import Body, GenerationBody, NamedRegex, ResponseFormat

_FIELDS: Mapping[str, Kind] = {
    "guided_json": "json_schema",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "schema": "json_schema",
    "regex": "regex",
    "regex_pattern": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "grammar_string": "grammar",
}
_OF_STRUCTURED: Mapping[str, Kind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
_OF_TYPE: Mapping[str, tuple[Kind, tuple[str, ...]]] = {
    "json_object": ("json_schema", ("schema", "json_schema.schema", "value")),
    "json": ("json_schema", ("schema", "json_schema.schema", "value")),
    "json_schema": ("json_schema", ("json_schema.schema", "schema", "value")),
    "regex": ("regex", ("regex", "value")),
    "regex_schema": ("regex", ("regex_schema", "value")),
    "grammar": ("grammar", ("grammar", "value")),
    "ebnf": ("grammar", ("ebnf", "value")),
    "text": ("grammar", ()),
}
"""The kind of constraint of each response format, and the fields that may hold it."""
_EMPTY_IS_NONE = ("grammar", "grammar_string", "ebnf", "json_schema")
"""Texts whose empty value is the default of the servers that they come from."""
_UNREAD = {
    "structural_tag",
    "response_schema",
    "response_json_schema",
    "response_mime_type",
    "responseSchema",
    "responseMimeType",
    "output_format",
    "output_schema",
    "output_config",
    "guided_decoding",
    "guided_decoding_params",
    "guided_whitespace_pattern",
    "whitespace_pattern",
    "ll_grammar",
    "lark",
    "json_mode",
    "json",
    "json_object",
    "choice",
}
"""Names of constraints that no field here has."""
_CONTAINERS = (
    "extra_body",
    "options",
    "parameters",
    "sampling_params",
    "nvext",
    "generation_config",
    "generationConfig",
)
"""Objects in which other servers, or clients that send an argument as a field, keep constraints."""


def find_constraint(request: GenerationBody, forced: Constraint | None = None) -> Constraint | None:
    """The one thing that a request's text must match, or None.

    Args:
        request: the typed body.
        forced: what `tool_choice` asks for.

    Raises:
        ApiError: 400 where two fields ask for something, or one is incomplete.
    """
    _refuse_strays(request)
    constraints = [*([forced] if forced else []), *_asked_for(request)]
    if len(constraints) > 1:
        raise bad_field(
            constraints[1].param, f"cannot go with `{constraints[0].param}`: the text can only match one of them"
        )
    return constraints[0] if constraints else None


def _asked_for(request: GenerationBody) -> Iterator[Constraint]:
    """Every constraint of a request's fields.

    Raises:
        ApiError: 400 naming a field that is incomplete, or not known inside a constraint.
    """
    if request.response_format is not None:
        yield from _of_format(request.response_format, "response_format")
    if request.text is not None:
        _check_known(request.text, "text")
        yield from [] if request.text.format is None else _of_format(request.text.format, "text.format")
    if request.structured_outputs is not None:
        _check_known(request.structured_outputs, "structured_outputs")
        yield from _of_fields(request.structured_outputs, _OF_STRUCTURED, "structured_outputs.")
    yield from _of_fields(request, _FIELDS, "")
    if request.format not in (None, ""):
        is_any = request.format == "json"
        yield Constraint("json_object" if is_any else "json_schema", "" if is_any else _text(request.format), "format")


def _refuse_strays(request: GenerationBody) -> None:
    """Refuse a constraint that would be left out without a word: under a name that is not read, or inside an object.

    Raises:
        ApiError: 400 naming it.
    """
    known = {*_FIELDS, "response_format", "structured_outputs", "guided_choice", "format", *_UNREAD}
    extra = request.model_extra or {}
    for name in sorted(_UNREAD & extra.keys()):
        if extra[name] not in (None, False, "text/plain"):
            raise bad_field(name, "is not read here: use `response_format`")
    for container in _CONTAINERS:
        inside = extra.get(container)
        for name in sorted(known & inside.keys()) if isinstance(inside, dict) else ():
            if inside is not None and inside[name] is not None:
                raise bad_field(f"{container}.{name}", "is not read here: send it at the top level of the body")


def _of_fields(body: Body, kinds: Mapping[str, Kind], prefix: str) -> Iterator[Constraint]:
    values = {field.alias or name: getattr(body, name) for name, field in type(body).model_fields.items()}
    for name, kind in kinds.items():
        value = values[name]
        if isinstance(value, ResponseFormat):
            yield from _of_format(value, prefix + name)
        elif kind == "json_object":
            yield from [Constraint(kind, "", prefix + name)] if value else ()
        elif value is not None and not (value == "" and name in _EMPTY_IS_NONE):
            yield Constraint(kind, _text(value), prefix + name)


def _of_format(response_format: ResponseFormat, where: str) -> Iterator[Constraint]:
    """The constraint of a response format; none of plain text."""
    _check_known(response_format, where)
    kind, names = _OF_TYPE[response_format.type]
    sources = dict(_sources(response_format, where))
    stray = next((name for name in sources if name not in names), None)
    if stray is not None:
        raise bad_field(f"{where}.{stray}", f"does not go with the type `{response_format.type}`")
    if len(sources) > 1:
        raise bad_field(f"{where}.{list(sources)[1]}", f"cannot go with `{where}.{next(iter(sources))}`")
    for name, value in sources.items():
        if kind != "json_schema" and not isinstance(value, str):
            raise bad_field(f"{where}.{name}", "must be a string")
        if kind == "json_schema" and not isinstance(value, dict | bool | str):
            raise bad_field(f"{where}.{name}", "must be a JSON schema")
        yield Constraint(kind, _text(value), f"{where}.{name}")
    if names and not sources:
        if response_format.type not in ("json_object", "json"):
            raise bad_field(f"{where}.{names[0]}", "is missing")
        yield Constraint("json_object", "", where)


def _sources(response_format: ResponseFormat, where: str) -> Iterator[tuple[str, Any]]:
    """The constraints of a response format, by the field that holds them."""
    if response_format.json_schema is not None:
        _check_known(response_format.json_schema, f"{where}.json_schema")
        yield "json_schema.schema", response_format.json_schema.schema_
    value = response_format.value
    if response_format.type == "json_schema" and isinstance(value, dict) and isinstance(value.get("schema"), dict):
        value = value["schema"]
    regex = response_format.regex.regex if isinstance(response_format.regex, NamedRegex) else response_format.regex
    named = {
        "schema": response_format.schema_,
        "value": value,
        "regex": regex,
        "regex_schema": response_format.regex_schema,
    }
    named |= {"grammar": response_format.grammar, "ebnf": response_format.ebnf}
    yield from ((name, source) for name, source in named.items() if source is not None)


def _check_known(body: Body, where: str) -> None:
    """Refuse an unknown field inside a constraint: it would be part of what the text must match."""
    for name in body.model_extra or {}:
        raise bad_field(f"{where}.{name[:100]}", "is not known")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
