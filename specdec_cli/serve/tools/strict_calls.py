"""A grammar for text in which calls of strict tools follow their schemas, in the model's own format.

The text is free up to a mark that begins calls, whether the model writes it as one special token or letter by letter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec_cli.serve.constraint import Constraint
from specdec_cli.serve.errors import bad_field
from specdec_cli.serve.protocol import Tool
from specdec_cli.serve.tools import arguments
from specdec_cli.serve.tools.formats import FORMATS
from specdec_cli.serve.tools.scanner import quoted

if TYPE_CHECKING:
    from specdec_cli.text.tokenizer import Tokenizer

_KEY = re.compile(r"[\w\-.$@/]+")
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python writes it, which is how templates show it to models."""
_PLAIN = {"type", "title", "description", "default", "examples", "$schema", "enum", "const", "anyOf", "oneOf"}
"""Keywords of a string's schema that a text between tags can follow."""
_OF_OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_OBJECT |= {"title", "description", "default", "examples", "$schema", "$id"}

_HEADS = {"TEXT": r"(.|\n)*", "FIRST": r"([ \t\r\n]*[^ \t\r\n{\[](.|\n)*)?"}
"""Any text, and text that does not begin like a call without a mark."""


def constrain_strict(form: str, tools: Sequence[Tool], tokenizer: Tokenizer, only_one: bool) -> Constraint | None:
    """The grammar of a text whose calls of strict tools follow their schemas; None where no tool is strict.

    Raises:
        ApiError: 400 naming a strict tool whose schema the format cannot follow.
    """
    strict = next((i for i, tool in enumerate(tools) if tool.function.strict), None)
    if strict is None:
        return None
    source = CallGrammar(form, tools, tokenizer, only_one).source()
    return Constraint("grammar", source, f"tools[{strict}].function.strict")


class CallGrammar:
    """Rules of a grammar in Lark's form, and how formats write them."""

    def __init__(self, form: str, tools: Sequence[Tool], tokenizer: Tokenizer, only_one: bool) -> None:
        self._form = form
        self._format = FORMATS[form]
        self._tools = tools
        self._only_one = only_one
        self._added: dict[str, int] = dict(tokenizer.hf.get_added_vocab())
        self._rules: list[str] = []
        self._once: dict[str, str] = {}

    def source(self) -> str:
        """The whole grammar."""
        is_bare = bool(self._format.bare_starts)
        sections = {mark: self.rule(body) for mark, body in self._format.sections(self).items()}
        others = sorted(token for text, token in self._added.items() if text not in sections)
        special = f"<[{','.join(map(str, others))}]>" if others else ""
        more = f"({special} TEXT)*" if others else ""
        calls = self.rule(" | ".join(f"{self._open(mark, 'TEXT')} {body}" for mark, body in sections.items()))
        start = f"text {calls}?" if self._only_one else f"text ({calls} text)*"
        if is_bare:
            first = " | ".join(f"{self._open(mark, 'FIRST')} {body}" for mark, body in sections.items())
            first = self.rule(f"{first} | FIRST {more} {special} {calls}" if others else first)
            rest = "" if self._only_one else start
            start = f"{self._format.bare_calls(self)} | FIRST {more} | {first} {rest}"
        return "\n".join(
            [
                "%llguidance {}",
                f"start: {start}",
                f"text: TEXT {more}",
                f"TEXT: /{_HEADS['TEXT']}/",
                *([f"FIRST: /{_HEADS['FIRST']}/"] if is_bare else ()),
                *self._rules,
            ]
        )

    def once(self, name: str, body: Callable[[], str]) -> str:
        """A rule that is written on first use."""
        if name not in self._once:
            self._once[name] = self.rule(body())
        return self._once[name]

    def any_object(self, key: str = "arguments") -> str:
        """An object with a call's name and arguments."""

        def call(tool: Tool) -> str:
            head = f'{{"name": {json.dumps(tool.function.name)}, "{key}": '
            return f'{quoted(head)} {self.arguments(tool)} "}}"'

        return self.each(call)

    def arguments(self, tool: Tool) -> str:
        """A call's arguments as JSON."""
        schema = tool.function.arguments_schema if tool.function.strict else {"type": "object"}
        return self.once(f"arguments of {tool.function.name}", lambda: self.json(schema))

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON of a schema, spaced as Python writes it."""
        guidance = schema.get("x-guidance")
        spacing = _SPACED | (guidance if isinstance(guidance, dict) else {})
        return f"%json {json.dumps({**schema, 'x-guidance': spacing})}"

    def parameters(self, tool: Tool, head: Callable[[str | None], str], close: str, end: str) -> str:
        """Values as text between tags, in the schema's order.

        Args:
            tool: whose schema they follow, if it is strict.
            head: what stands before the value of a name, or of any name.
            close: the rest of that.
            end: after a value.
        """
        closed = quoted(close) if close else ""
        if not tool.function.strict:
            return f'({head(None)} {closed} {self._until(end)} "\\n"?)*'
        parameters = []
        for key, schema, is_required in self.members(tool):
            value = self._value(tool, key, schema, end)
            parameters.append(f'({head(key)} {closed} {value} "\\n"?){"" if is_required else "?"}')
        return " ".join(parameters)

    def _value(self, tool: Tool, key: str, schema: Mapping[str, Any], end: str) -> str:
        """One value as text, with its closing tag."""
        types = arguments.types_of({"properties": {key: schema}, **_shared(schema)}, key)
        if types and "string" not in types:
            return f'"\\n"? {self.rule(f"{self.json(schema)}")} "\\n"? {self.mark(end.lstrip())}'
        is_text = types <= {"string", "null"} and all(set(part) <= _PLAIN for part in _parts(schema))
        if not is_text:
            raise self._refused(tool, f"the string `{key}` has more than a type")
        texts = [schema["const"]] if "const" in schema else schema.get("enum")
        if texts is None:
            return self._until(end)
        return f"({' | '.join(quoted(str(text)) for text in texts)}) {self.mark(end)}"

    def members(
        self, tool: Tool, is_name: Callable[[str], object] = _KEY.fullmatch
    ) -> list[tuple[str, dict[str, Any], bool]]:
        """The properties of a tool's schema: name, schema, whether it is required."""
        schema = tool.function.parameters or {}
        other = next((word for word in schema if word not in _OF_OBJECT), None)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if other is not None or not isinstance(properties, dict) or not isinstance(required, list):
            raise self._refused(tool, f"the schema has `{other or 'properties'}` beside its properties")
        odd = next((key for key in properties if not is_name(key)), None)
        if odd is not None:
            raise self._refused(tool, f"`{odd[:50]}` is no name that a call can hold")
        return [
            (key, (member if isinstance(member, dict) else {}) | _shared(schema), key in required)
            for key, member in properties.items()
        ]

    def _refused(self, tool: Tool, why: str) -> Exception:
        message = f"cannot be enforced in the model's format `{self._form}`: {why}; force the call with `tool_choice`"
        return bad_field(f"tools[{self._tools.index(tool)}].function.strict", message)

    def each(self, call: Callable[[Tool], str]) -> str:
        """A rule with one alternative for each tool."""
        return self.rule(" | ".join(self.rule(call(tool)) for tool in self._tools))

    def listed(self, item: str) -> str:
        """A JSON list of items; of one where only one call is allowed."""
        return f'"[" "\\n"? {self.many(item, quoted(", "))} "\\n"? "]"'

    def many(self, item: str, between: str) -> str:
        """One item or several; one where only one call is allowed."""
        return item if self._only_one else f"{item} ({between} {item})*"

    def mark(self, text: str) -> str:
        """A mark, as its special token where it has one, and as text."""
        return f"(<[{self._added[text]}]> | {quoted(text)})" if text in self._added else quoted(text)

    def _open(self, mark: str, head: str) -> str:
        """A mark that begins calls, with the text before it."""
        written = self.rule(f"/{_HEADS[head]}/ {quoted(mark)}", "[lazy]")
        return f"({head} <[{self._added[mark]}]> | {written})" if mark in self._added else written

    def _until(self, end: str) -> str:
        """Text up to and with a closing mark."""
        written = self.rule(f"/(.|\\n)*/ {quoted(end)}", "[lazy]")
        return f"(TEXT <[{self._added[end]}]> | {written})" if end in self._added else written

    def rule(self, body: str, attributes: str = "") -> str:
        """The name of a new rule."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name


def _shared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Definitions that a property's schema may refer to."""
    return {place: schema[place] for place in ("$defs", "definitions") if place in schema}


def _parts(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A schema and its alternatives, without definitions."""
    own = {word: value for word, value in schema.items() if word not in ("$defs", "definitions")}
    choices = [choice for word in ("anyOf", "oneOf") for choice in own.get(word) or () if isinstance(choice, dict)]
    return [own, *(part for choice in choices for part in _parts(choice))]
