"""Constraints on the output, and the JSON of forced tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specdec_cli.errors import UsageError
from specdec_cli.serve.errors import as_api_error, bad_field
from specdec_cli.serve.protocol import Tool

if TYPE_CHECKING:
    from specdec_cli.sampling.grammar import Grammar
    from specdec_cli.sampling.grammar_sandbox import Cancellation, GrammarCompiler
    from specdec_cli.text.tokenizer import Tokenizer

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint that the text must match.

    Args:
        kind: json_schema, json_object, regex, choice or grammar.
        source: its text, as `compile_grammar` reads it.
        param: the field that asked for it.
    """

    kind: Kind
    source: str
    param: str

    def check(self, tokenizer: Tokenizer | None, max_bytes: int) -> None:
        """Refuse what need not be compiled for that.

        Raises:
            ApiError: 400 naming the field: too large, or there is no tokenizer.
        """
        size = len(self.source.encode())
        if size > max_bytes:
            raise bad_field(self.param, f"has `{size}` bytes, and at most `{max_bytes}` are taken")
        if tokenizer is None:
            raise bad_field(self.param, "needs a tokenizer, and the model has none")

    def compile(self, tokenizer: Tokenizer, compiler: GrammarCompiler, cancellation: Cancellation) -> Grammar:
        """The grammar.

        Raises:
            ApiError: 400 naming the field: it does not compile within the limits.
        """
        try:
            grammar = compiler.compile(self.kind, self.source, tokenizer, cancellation)
        except UsageError as error:
            error.message = error.message.replace(f"`{self.kind}` ", f"`{self.param}` ", 1)
            raise as_api_error(error, self.param) from error
        except RecursionError:
            raise bad_field(self.param, "is nested too deep") from None
        if grammar.warnings:
            raise bad_field(self.param, f"cannot be enforced as a whole: {grammar.warnings[0]}")
        return grammar


def force_tools(tools: Sequence[Tool], named: str | None, only_one: bool) -> Constraint:
    """The JSON that a forced call is: the arguments of a named tool, else a list of calls.

    Raises:
        ApiError: 400 naming the tool whose schema's definitions differ from another's.
    """
    schemas = {tool.function.name: tool.function.arguments_schema for tool in tools}
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
