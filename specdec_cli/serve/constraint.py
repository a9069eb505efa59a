"""What a request's text must match: `response_format`, `structured_outputs`, vLLM's older `guided_…`, forced tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specdec_cli.errors import UsageError
from specdec_cli.serve.errors import as_api_error, bad_field
from specdec_cli.serve.protocol import GenerationBody, Tool

if TYPE_CHECKING:
    from specdec_cli.sampling.grammar import Grammar
    from specdec_cli.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Constraint:
    """One thing that the text must match.

    Args:
        kind: json_schema, json_object, regex, choice or grammar.
        source: its text, as `compile_grammar` reads it.
        param: the field that asked for it.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    source: str
    param: str

    def compile(self, tokenizer: Tokenizer | None, max_bytes: int) -> Grammar:
        """The grammar.

        Raises:
            ApiError: 400 naming the field: too large, or it does not compile.
        """
        from specdec_cli.sampling.grammar import compile_grammar

        size = len(self.source.encode())
        if size > max_bytes:
            raise bad_field(self.param, f"has `{size}` bytes, and at most `{max_bytes}` are taken")
        if tokenizer is None:
            raise bad_field(self.param, "needs a tokenizer, and the model has none")
        try:
            return compile_grammar(self.kind, self.source, tokenizer)
        except UsageError as error:
            raise as_api_error(error, self.param) from error
        except RecursionError:
            raise bad_field(self.param, "is nested too deep") from None


def find_constraint(request: GenerationBody, forced: Constraint | None = None) -> Constraint | None:
    """The one thing that a request's text must match, or None.

    Args:
        request: the typed body.
        forced: what `tool_choice` asks for.

    Raises:
        ApiError: 400 where two fields ask for something, or one is incomplete.
    """
    found = [*([forced] if forced else []), *_of_format(request), *_of_structured(request), *_of_guided(request)]
    if len(found) > 1:
        raise bad_field(found[1].param, f"cannot go with `{found[0].param}`: the text can only match one of them")
    return found[0] if found else None


def force_tools(tools: Sequence[Tool], named: str | None, only_one: bool) -> Constraint:
    """The JSON that a forced call is: the arguments of a named tool, else a list of calls.

    Raises:
        ApiError: 400 naming the tool whose schema's definitions differ from another's.
    """
    schemas = {tool.function.name: tool.function.parameters or {"type": "object"} for tool in tools}
    if named is not None:
        return Constraint("json_schema", json.dumps(schemas[named]), "tools")
    shared: dict[str, dict[str, Any]] = {"$defs": {}, "definitions": {}}
    calls = []
    for i, (name, schema) in enumerate(schemas.items()):
        for place, known in shared.items():
            for key, value in schema.get(place, {}).items() if isinstance(schema.get(place), dict) else ():
                if known.setdefault(key, value) != value:
                    raise bad_field(f"tools[{i}].function.parameters", f"defines `{key}` differently than another tool")
        inner = {key: value for key, value in schema.items() if key not in shared}
        properties = {"name": {"const": name}, "parameters": inner}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    document = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    document |= {"maxItems": 1} if only_one else {}
    return Constraint("json_schema", json.dumps(document | {k: v for k, v in shared.items() if v}), "tools")


def _of_format(request: GenerationBody) -> Iterator[Constraint]:
    asked = request.response_format
    if asked is None or asked.type == "text":
        return
    if asked.type == "json_object":
        yield Constraint("json_object", "", "response_format")
        return
    schema = asked.json_schema.schema_ if asked.json_schema is not None else None
    if schema is None:
        raise bad_field("response_format.json_schema.schema", "is missing")
    yield Constraint("json_schema", json.dumps(schema), "response_format.json_schema.schema")


def _of_structured(request: GenerationBody) -> Iterator[Constraint]:
    asked = request.structured_outputs
    if asked is None:
        return
    if asked.json_ is not None:
        yield _schema(asked.json_, "structured_outputs.json")
    if asked.json_object:
        yield Constraint("json_object", "", "structured_outputs.json_object")
    if asked.regex is not None:
        yield Constraint("regex", asked.regex, "structured_outputs.regex")
    if asked.choice is not None:
        yield Constraint("choice", json.dumps(asked.choice), "structured_outputs.choice")
    if asked.grammar is not None:
        yield Constraint("grammar", asked.grammar, "structured_outputs.grammar")


def _of_guided(request: GenerationBody) -> Iterator[Constraint]:
    if request.guided_json is not None:
        yield _schema(request.guided_json, "guided_json")
    if request.guided_regex is not None:
        yield Constraint("regex", request.guided_regex, "guided_regex")
    if request.guided_choice is not None:
        yield Constraint("choice", json.dumps(request.guided_choice), "guided_choice")
    if request.guided_grammar is not None:
        yield Constraint("grammar", request.guided_grammar, "guided_grammar")


def _schema(given: dict[str, Any] | str, param: str) -> Constraint:
    return Constraint("json_schema", given if isinstance(given, str) else json.dumps(given), param)
