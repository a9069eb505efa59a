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
from specdec_cli.serve.tools.json_calls import MARKS, TOKENS, CallTokens
from specdec_cli.serve.tools.tag_calls import TAGS, Tags
from specdec_cli.serve.tools.tools import PYTHON_MARKS, Format

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


def constrain_strict(form: Format, tools: Sequence[Tool], tokenizer: Tokenizer, only_one: bool) -> Constraint | None:
    """The grammar of a text whose calls of strict tools follow their schemas; None where no tool is strict.

    Args:
        form: the model's format.
        tools: of the request.
        tokenizer: of the model, for its special tokens.
        only_one: whether the text holds one call at most.

    Raises:
        ApiError: 400 naming a strict tool whose schema the format cannot follow.
    """
    strict = next((i for i, tool in enumerate(tools) if tool.function.strict), None)
    if strict is None:
        return None
    source = _CallGrammar(form, tools, tokenizer, only_one).source()
    return Constraint("grammar", source, f"tools[{strict}].function.strict")


class _CallGrammar:
    """Writes the rules, in Lark's form."""

    def __init__(self, form: Format, tools: Sequence[Tool], tokenizer: Tokenizer, only_one: bool) -> None:
        self._form: str = form
        self._tools = tools
        self._only_one = only_one
        self._added: dict[str, int] = dict(tokenizer.hf.get_added_vocab())
        self._rules: list[str] = []
        self._objects: dict[str, str] = {}
        self._bare: str | None = None

    def source(self) -> str:
        """The whole grammar."""
        is_bare = self._form in ("llama3_json", "pythonic")
        sections = {mark: self._rule(body) for mark, body in self._sections().items()}
        others = sorted(token for text, token in self._added.items() if text not in sections)
        special = f"<[{','.join(map(str, others))}]>" if others else ""
        more = f"({special} TEXT)*" if others else ""
        calls = self._rule(" | ".join(f"{self._open(mark, 'TEXT')} {body}" for mark, body in sections.items()))
        start = f"text {calls}?" if self._only_one else f"text ({calls} text)*"
        if is_bare:
            first = " | ".join(f"{self._open(mark, 'FIRST')} {body}" for mark, body in sections.items())
            first = self._rule(f"{first} | FIRST {more} {special} {calls}" if others else first)
            rest = "" if self._only_one else start
            start = f"{self._bare_calls()} | FIRST {more} | {first} {rest}"
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

    def _sections(self) -> dict[str, str]:
        """Rules of what follows each mark that begins calls."""
        form = self._form
        if form in MARKS:
            return self._marked(*MARKS[form])
        if form in TAGS:
            return self._tagged(TAGS[form])
        if form in TOKENS:
            return self._tokened(TOKENS[form])
        by_form = {"glm45": self._glm, "mistral": self._mistral, "olmo3": self._olmo}
        return by_form.get(form, self._bare_sections)()

    def _marked(self, begin: str, end: str) -> dict[str, str]:
        one = self._any_object()
        calls = one if self._form == "hermes" else f'" "? {self._list(one)}'
        return {begin: f'"\\n"? {calls} "\\n"? {self._mark(end) if end else ""}'}

    def _glm(self) -> dict[str, str]:
        one = self._each(lambda tool: f"{_text(tool.function.name)} {self._key_values(tool)}")
        return {"<tool_call>": f"{one} {self._mark('</tool_call>')}"}

    def _mistral(self) -> dict[str, str]:
        named = self._each(lambda tool: f"{_text(tool.function.name)} {self._mark('[ARGS]')}? {self._object(tool)}")
        return {"[TOOL_CALLS]": f'" "? ({self._list(self._any_object())} | {named})'}

    def _olmo(self) -> dict[str, str]:
        calls = self._many(self._python_call(), '"\\n"')
        return {"<function_calls>": f'"\\n"? {calls} "\\n"? {self._mark("</function_calls>")}'}

    def _bare_sections(self) -> dict[str, str]:
        marks = {"<|python_tag|>": ""} if self._form == "llama3_json" else PYTHON_MARKS
        return {begin: f"{self._bare_calls()} {self._mark(end) if end else ''}" for begin, end in marks.items()}

    def _bare_calls(self) -> str:
        """A rule of calls without a mark, written once."""
        if self._bare is None and self._form == "pythonic":
            self._bare = self._rule(f'"[" {self._many(self._python_call(), _text(", "))} "]"')
        elif self._bare is None:
            self._bare = self._rule(self._many(self._any_object("parameters"), '(";" " "?)'))
        return self._bare

    def _tagged(self, tags: Tags) -> dict[str, str]:
        line = "\n" if self._form == "qwen3_coder" else ""
        (begin, close), end = tags.parameter, line + tags.end_parameter

        def call(tool: Tool) -> str:
            parameters = self._parameters(
                tool,
                lambda key: _text(begin + (key or "")) + ("" if key is not None else ' /[^>"\\n]+/ '),
                close + line,
                end,
            )
            return f'{_text(tool.function.name + tags.call[1])} "\\n"? {parameters} {self._mark(tags.end_call)} "\\n"?'

        one, opened = self._each(call), self._mark(tags.call[0])
        more = "" if self._only_one else f"({opened} {one})*"
        calls = f"{one} {more} {self._mark(tags.end)}"
        return {tags.begin: f'"\\n"? {opened} {calls}', tags.call[0]: calls}

    def _tokened(self, tokens: CallTokens) -> dict[str, str]:
        between, end = self._mark(tokens.arguments), self._mark(tokens.end_call)

        def call(tool: Tool) -> str:
            name, given = tool.function.name, self._object(tool)
            if self._form == "kimi_k2":
                return f"{_text(f'functions.{name}:')} /[0-9]+/ {between} {given} {end}"
            fence = _text(name + "\n```json\n")
            fenced = f'"function" {between} {fence} {given} {_text(chr(10) + "```")}'
            return f"({fenced} | {_text(name)} {between} {given}) {end}"

        one, opened = self._each(call), self._mark(tokens.call)
        more = "" if self._only_one else f'("\\n"? {opened} {one})*'
        calls = f"{one} {more} {self._mark(tokens.end)}"
        return {tokens.begin: f"{opened} {calls}", tokens.call: calls}

    def _any_object(self, key: str = "arguments") -> str:
        """An object with a call's name and arguments."""

        def call(tool: Tool) -> str:
            head = f'{{"name": {json.dumps(tool.function.name)}, "{key}": '
            return f'{_text(head)} {self._object(tool)} "}}"'

        return self._each(call)

    def _object(self, tool: Tool) -> str:
        """A call's arguments as JSON."""
        name = tool.function.name
        if name not in self._objects:
            schema = tool.function.arguments_schema if tool.function.strict else {"type": "object"}
            self._objects[name] = self._rule(f"%json {_spaced(schema)}")
        return self._objects[name]

    def _key_values(self, tool: Tool) -> str:
        opened, closed, value = (self._mark(mark) for mark in ("<arg_key>", "</arg_key>", "<arg_value>"))

        def head(key: str | None) -> str:
            name = _text(key) if key is not None else r"/[^<\n]+/"
            return rf'"\n"? {opened} {name} {closed} "\n"? {value}'

        return f'{self._parameters(tool, head, "", "</arg_value>")} "\\n"?'

    def _python_call(self) -> str:
        def call(tool: Tool) -> str:
            name = _text(tool.function.name + "(")
            if not tool.function.strict:
                one = self._rule(f'/[a-zA-Z_]\\w*/ "=" %json {_spaced({})}')
                return f'{name} ({one} (", " {one})*)? ")"'
            rest = ""
            for key, schema, is_required in reversed(self._members(tool)):
                value = self._rule(f"{_text(key + '=')} %json {_spaced(schema)}")
                # What comes after is written twice: as the first argument, and behind a comma.
                first, later = rest.split() if rest else ("", "")
                one = self._rule(f"{value} {later}" + ("" if is_required else f" | {first or _text('')}"))
                comma = self._rule(f'", " {value} {later}' + ("" if is_required else f" | {later or _text('')}"))
                rest = f"{one} {comma}"
            return f'{name} {rest.split()[0] if rest else ""} ")"'

        return self._each(call)

    def _parameters(self, tool: Tool, head: Callable[[str | None], str], close: str, end: str) -> str:
        """Values as text between tags, in the schema's order.

        Args:
            tool: whose schema they follow, if it is strict.
            head: what stands before the value of a name, or of any name.
            close: the rest of that.
            end: after a value.
        """
        closed = _text(close) if close else ""
        if not tool.function.strict:
            return f'({head(None)} {closed} {self._until(end)} "\\n"?)*'
        found = []
        for key, schema, is_required in self._members(tool):
            value = self._value(tool, key, schema, end)
            found.append(f'({head(key)} {closed} {value} "\\n"?){"" if is_required else "?"}')
        return " ".join(found)

    def _value(self, tool: Tool, key: str, schema: Mapping[str, Any], end: str) -> str:
        """One value as text, with its closing tag."""
        types = arguments.types_of({"properties": {key: schema}, **_shared(schema)}, key)
        if types and "string" not in types:
            return f'"\\n"? {self._rule(f"%json {_spaced(schema)}")} "\\n"? {self._mark(end.lstrip())}'
        is_text = types <= {"string", "null"} and all(set(part) <= _PLAIN for part in _parts(schema))
        if not is_text:
            raise self._refused(tool, f"the string `{key}` has more than a type")
        texts = [schema["const"]] if "const" in schema else schema.get("enum")
        if texts is None:
            return self._until(end)
        return f"({' | '.join(_text(str(text)) for text in texts)}) {self._mark(end)}"

    def _members(self, tool: Tool) -> list[tuple[str, dict[str, Any], bool]]:
        """The properties of a tool's schema: name, schema, whether it is required."""
        schema = tool.function.parameters or {}
        other = next((word for word in schema if word not in _OF_OBJECT), None)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if other is not None or not isinstance(properties, dict) or not isinstance(required, list):
            raise self._refused(tool, f"the schema has `{other or 'properties'}` beside its properties")
        is_name = str.isidentifier if self._form in ("pythonic", "olmo3") else _KEY.fullmatch
        odd = next((key for key in properties if not is_name(key)), None)
        if odd is not None:
            raise self._refused(tool, f"`{odd[:50]}` is no name that a call can hold")
        return [
            (key, (one if isinstance(one, dict) else {}) | _shared(schema), key in required)
            for key, one in properties.items()
        ]

    def _refused(self, tool: Tool, why: str) -> Exception:
        said = f"cannot be enforced in the model's format `{self._form}`: {why}; force the call with `tool_choice`"
        return bad_field(f"tools[{self._tools.index(tool)}].function.strict", said)

    def _each(self, call: Callable[[Tool], str]) -> str:
        """A rule with one alternative for each tool."""
        return self._rule(" | ".join(self._rule(call(tool)) for tool in self._tools))

    def _list(self, one: str) -> str:
        return f'"[" "\\n"? {self._many(one, _text(", "))} "\\n"? "]"'

    def _many(self, one: str, between: str) -> str:
        return one if self._only_one else f"{one} ({between} {one})*"

    def _mark(self, text: str) -> str:
        """A mark, as its special token where it has one, and as text."""
        return f"(<[{self._added[text]}]> | {_text(text)})" if text in self._added else _text(text)

    def _open(self, mark: str, head: str) -> str:
        """A mark that begins calls, with the text before it."""
        written = self._rule(f"/{_HEADS[head]}/ {_text(mark)}", "[lazy]")
        return f"({head} <[{self._added[mark]}]> | {written})" if mark in self._added else written

    def _until(self, end: str) -> str:
        """Text up to and with a closing mark."""
        written = self._rule(f"/(.|\\n)*/ {_text(end)}", "[lazy]")
        return f"(TEXT <[{self._added[end]}]> | {written})" if end in self._added else written

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _spaced(schema: Mapping[str, Any]) -> str:
    given = schema.get("x-guidance")
    return json.dumps({**schema, "x-guidance": _SPACED | (given if isinstance(given, dict) else {})})


def _shared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Definitions that a property's schema may refer to."""
    return {place: schema[place] for place in ("$defs", "definitions") if place in schema}


def _parts(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A schema and its alternatives, without definitions."""
    own = {word: value for word, value in schema.items() if word not in ("$defs", "definitions")}
    choices = [one for word in ("anyOf", "oneOf") for one in own.get(word) or () if isinstance(one, dict)]
    return [own, *(part for one in choices for part in _parts(one))]
