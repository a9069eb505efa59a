"""Tool calls written as Python: `f(x=1, y='a')`, inside brackets or one to a line."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.serve.protocol import Tool
from specdec_cli.serve.tools import arguments
from specdec_cli.serve.tools.call_format import CallFormat, WrittenCall, as_json
from specdec_cli.serve.tools.calls import Calls
from specdec_cli.serve.tools.scanner import NoCallError, Steps, after_space, expect, one_of, quoted

if TYPE_CHECKING:
    from specdec_cli.serve.tools.strict_calls import CallGrammar

_KEYWORD = re.compile(r"\s*(\w+)\s*=(?!=)\s*(.*)", re.DOTALL)
_MARKS = {
    "<|python_start|>": "<|python_end|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<|python_tag|>": "",
}
"""The text before and after bracketed calls, of Llama 4 and LFM2."""


@dataclass(frozen=True)
class BracketedPython(CallFormat):
    """Calls inside brackets, at the beginning of a turn or between tokens."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens of several families."""
        return tuple(_MARKS)

    def read(self, calls: Calls, marker: str) -> Steps:
        """Brackets and the closing token."""
        yield from one_of(("[",), (yield from after_space((yield))))
        char = yield from self._read_bracketed(calls, any_name=True)
        if not (end := _MARKS[marker]):
            return char
        yield from one_of((end,), (yield from after_space(char)))
        return (yield)

    def read_bare(self, calls: Calls, char: str | None) -> Steps:
        """Brackets with calls of tools that the request has."""
        return self._read_bracketed(calls, any_name=False)

    def _read_bracketed(self, calls: Calls, any_name: bool) -> Steps:
        char = yield from read_python_calls(calls, (yield), any_name)
        expect("]", char)
        calls.end_text()
        return (yield)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        """Brackets without tokens."""
        return f"[{', '.join(_written(calls))}]"

    def sections(self, grammar: CallGrammar) -> dict[str, str]:
        """Brackets and the closing token."""
        calls = self.bare_calls(grammar)
        return {begin: f"{calls} {grammar.mark(end) if end else ''}" for begin, end in _MARKS.items()}

    def bare_calls(self, grammar: CallGrammar) -> str:
        """Brackets."""
        return grammar.once("bare", lambda: f'"[" {grammar.many(_call_rule(grammar), quoted(", "))} "]"')


@dataclass(frozen=True)
class PythonLines(CallFormat):
    """Calls one to a line, between tags."""

    def read(self, calls: Calls, marker: str) -> Steps:
        """Lines and the closing tag."""
        char = yield from read_python_calls(calls, (yield), any_name=True)
        yield from one_of((self.end,), char)
        return (yield)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        """Lines between tags."""
        return "\n".join((self.begin, *_written(calls), self.end))

    def sections(self, grammar: CallGrammar) -> dict[str, str]:
        """Lines and the closing tag."""
        calls = grammar.many(_call_rule(grammar), '"\\n"')
        return {self.begin: f'"\\n"? {calls} "\\n"? {grammar.mark(self.end)}'}


def _written(calls: Sequence[WrittenCall]) -> list[str]:
    return [
        f"{name}({', '.join(f'{key}={as_json(value)}' for key, value in members.items())})"
        for name, _, members in calls
    ]


def _call_rule(grammar: CallGrammar) -> str:
    """A call, with its arguments in the schema's order."""

    def call(tool: Tool) -> str:
        name = quoted(tool.function.name + "(")
        if not tool.function.strict:
            argument = grammar.rule(f'/[a-zA-Z_]\\w*/ "=" {grammar.json({})}')
            return f'{name} ({argument} (", " {argument})*)? ")"'
        rest = ""
        for key, schema, is_required in reversed(grammar.members(tool, str.isidentifier)):
            value = grammar.rule(f"{quoted(key + '=')} {grammar.json(schema)}")
            # What comes after is written twice: as the first argument, and behind a comma.
            first, later = rest.split() if rest else ("", "")
            argument = grammar.rule(f"{value} {later}" + ("" if is_required else f" | {first or quoted('')}"))
            comma = grammar.rule(f'", " {value} {later}' + ("" if is_required else f" | {later or quoted('')}"))
            rest = f"{argument} {comma}"
        return f'{name} {rest.split()[0] if rest else ""} ")"'

    return grammar.each(call)


def read_python_calls(calls: Calls, char: str | None, any_name: bool) -> Steps:
    """Calls from their first letter on, with commas, semicolons or white space between them.

    Args:
        calls: takes them.
        char: the first character.
        any_name: whether a call may have the name of no tool.
    """
    num_before = calls.num_calls
    char = yield from after_space(char)
    while char is not None and (char.isalnum() or char == "_"):
        name = ""
        while char is not None and (char.isalnum() or char in "_.-"):
            name += char
            char = yield
        if (yield from after_space(char)) != "(":
            raise NoCallError
        calls.begin(calls.known(name, any_name))
        yield from _read_arguments(calls)
        calls.close()
        char = yield from after_space((yield))
        if char is not None and char in ",;":
            char = yield from after_space((yield))
    if calls.num_calls == num_before:
        raise NoCallError
    return char


def _read_arguments(calls: Calls) -> Generator[None, str | None, None]:
    """The arguments up to the closing parenthesis; those without a name have the schema's, in its order."""
    places = iter(arguments.property_names(calls.schema))
    end: str | None = ","
    while end == ",":
        expression: list[str] = []
        end = yield from _read_expression(expression)
        source = "".join(expression)
        named = _KEYWORD.fullmatch(source)
        if end is None:
            _begin_argument(calls, named)
            raise NoCallError
        if not source.strip():
            continue
        key = next(places, None) if named is None else named[1]
        if key is None:
            raise NoCallError
        calls.argument(key, arguments.from_python(source if named is None else named[2], calls.schema, key))


def _begin_argument(calls: Calls, named: re.Match[str] | None) -> None:
    """An argument that the output's end cuts: of a string as much as is there, of anything else nothing."""
    if named is not None and named[2][:1] in ("'", '"'):
        calls.argument(named[1], arguments.begun(named[2][1:], {}, named[1]))


def _read_expression(expression: list[str]) -> Steps:
    """One expression; returns the comma or parenthesis that ends it, None at the output's end."""
    depth, quote, is_escaped, num_quoted = 0, "", False, 0
    while (char := (yield)) is not None:
        if quote:
            num_quoted += 1
            if is_escaped:
                is_escaped = False
            elif char == "\\":
                is_escaped = True
            elif char == quote[0] and (len(quote) == 1 or (num_quoted >= 3 and expression[-2:] == [char, char])):
                quote = ""
        elif char in "\"'":
            is_third = len(expression) > 1 and expression[-2:] == [char, char]
            quote, num_quoted = (char * 3 if is_third else char), 0
        elif depth == 0 and char in ",)":
            return char
        else:
            depth += (char in "([{") - (char in ")]}")
        expression.append(char)
    return None
