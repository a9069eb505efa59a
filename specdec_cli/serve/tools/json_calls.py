"""Tool calls written as JSON objects, and as a name before the JSON of its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.serve.protocol import Tool
from specdec_cli.serve.tools.call_format import CallFormat, WrittenCall, written_objects
from specdec_cli.serve.tools.calls import Calls
from specdec_cli.serve.tools.scanner import (
    NoCallError,
    Steps,
    after_space,
    expect,
    loads,
    one_of,
    quoted,
    read_arguments,
    read_until,
    read_value,
)

if TYPE_CHECKING:
    from specdec_cli.serve.tools.strict_calls import CallGrammar


@dataclass(frozen=True)
class MarkedObjects(CallFormat):
    """JSON objects with a call's name and arguments behind a marker: one, or a list of them.

    Args:
        is_list: whether a section is written as a list, else each call has its own section.
    """

    is_list: bool = True

    def read(self, calls: Calls, marker: str) -> Steps:
        """An object or a list of objects, and the closing mark."""
        char = yield from after_space((yield))
        if char == "[":
            char = yield from read_array(calls, char, any_name=True)
        else:
            char = yield from read_object(calls, char, any_name=True)
        if not self.end:
            return char
        yield from one_of((self.end,), (yield from after_space(char)))
        return (yield)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        """A list, or a section for each call."""
        objects = written_objects(calls)
        if self.is_list:
            return f"{self.begin}[{', '.join(objects)}]{self.end}"
        return "\n".join(f"{self.begin}\n{call}\n{self.end}" for call in objects)

    def sections(self, grammar: CallGrammar) -> dict[str, str]:
        """The list or the object, and the closing mark."""
        call = grammar.any_object()
        calls = f'" "? {grammar.listed(call)}' if self.is_list else call
        return {self.begin: f'"\\n"? {calls} "\\n"? {grammar.mark(self.end) if self.end else ""}'}


@dataclass(frozen=True)
class BareObjects(CallFormat):
    """Llama 3's JSON objects, at the beginning of a turn or behind a marker, several with semicolons between them."""

    def read(self, calls: Calls, marker: str) -> Steps:
        """Objects or a list of them."""
        return (yield from read_objects(calls, (yield from after_space((yield))), any_name=True))

    def read_bare(self, calls: Calls, char: str | None) -> Steps:
        """Read a bare call, of a tool that the request has."""
        return read_objects(calls, char, any_name=False)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        """Objects with semicolons between them."""
        return "; ".join(written_objects(calls, "parameters"))

    def sections(self, grammar: CallGrammar) -> dict[str, str]:
        """The objects alone."""
        return {self.begin: self.bare_calls(grammar)}

    def bare_calls(self, grammar: CallGrammar) -> str:
        """Objects with semicolons between them."""
        return grammar.once("bare", lambda: grammar.many(grammar.any_object("parameters"), '(";" " "?)'))


@dataclass(frozen=True)
class MistralCalls(CallFormat):
    """Mistral's list of objects behind a marker, or a name and its arguments; an id may stand between those."""

    def read(self, calls: Calls, marker: str) -> Steps:
        """A list, or one call."""
        char = yield from after_space((yield))
        if char == "[":
            return (yield from read_array(calls, char, any_name=True))
        name = ""
        while char is not None and char not in "[{":
            name += char
            char = yield
        while char is not None and char != "{":  # [CALL_ID]…[ARGS]
            char = yield
        if char is None or not name.strip():
            raise NoCallError
        calls.begin(name.strip())
        char = yield from read_value(char, calls.argue)
        calls.close_object(char)
        return char

    def write(self, calls: Sequence[WrittenCall]) -> str:
        """A list."""
        return f"{self.begin}[{', '.join(written_objects(calls))}]"

    def sections(self, grammar: CallGrammar) -> dict[str, str]:
        """A list, or one call."""
        arguments = grammar.mark("[ARGS]")
        named = grammar.each(lambda tool: f"{quoted(tool.function.name)} {arguments}? {grammar.arguments(tool)}")
        return {self.begin: f'" "? ({grammar.listed(grammar.any_object())} | {named})'}


@dataclass(frozen=True)
class NamedJson(CallFormat):
    """A name and the JSON of its arguments, in tokens of their own; DeepSeek-V3 writes a block of code.

    Args:
        call: before a call.
        arguments: between its name and its arguments.
        end_call: after them.
        name: pattern of what stands for the name.
    """

    call: str = ""
    arguments: str = ""
    end_call: str = ""
    name: re.Pattern[str] = re.compile("(.+)")

    @property
    def markers(self) -> tuple[str, ...]:
        """The outer token, or a first call's own, which models write without the outer one."""
        return self.begin, self.call

    def read(self, calls: Calls, marker: str) -> Steps:
        """Calls between tokens; DeepSeek-V3 writes `function` first, then the name and a block of code."""
        char: str | None = None
        if marker == self.begin:
            yield from one_of((self.call,), (yield from after_space((yield))))
        while True:
            name = (yield from read_until(self.arguments, (yield))).strip()
            char = yield from after_space((yield))
            if char != "{":
                name = (yield from read_until("```json", char)).strip()
                char = yield from after_space((yield))
            expect("{", char)
            named = self.name.fullmatch(name)
            calls.begin(calls.known(named and named[1], any_name=True))
            char = yield from read_value(char, calls.argue)
            calls.close_object(char)
            char = yield from after_space(char)
            if char == "`":
                yield from one_of(("```",), char)
                char = yield from after_space((yield))
            yield from one_of((self.end_call,), char)
            char = yield from after_space((yield))
            if char != "<":
                return char
            if (yield from one_of((self.end, self.call), char)) == self.end:
                return (yield)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        """All calls between their tokens."""
        is_numbered = self.ids == "numbered"
        names = [f"functions.{name}:{i}" if is_numbered else name for i, (name, _, _) in enumerate(calls)]
        written = (
            f"{self.call}{name}{self.arguments}{text or '{}'}{self.end_call}"
            for name, (_, text, _) in zip(names, calls, strict=True)
        )
        return f"{self.begin}{''.join(written)}{self.end}"

    def sections(self, grammar: CallGrammar) -> dict[str, str]:
        """Calls after the outer token, and after a call's own."""
        between, end = grammar.mark(self.arguments), grammar.mark(self.end_call)

        def call(tool: Tool) -> str:
            name, arguments = tool.function.name, grammar.arguments(tool)
            if self.ids == "numbered":
                return f"{quoted(f'functions.{name}:')} /[0-9]+/ {between} {arguments} {end}"
            fence = quoted(name + "\n```json\n")
            fenced = f'"function" {between} {fence} {arguments} {quoted(chr(10) + "```")}'
            return f"({fenced} | {quoted(name)} {between} {arguments}) {end}"

        call_rule, opened = grammar.each(call), grammar.mark(self.call)
        calls = grammar.many(call_rule, f'"\\n"? {opened}')
        calls = f"{calls} {grammar.mark(self.end)}"
        return {self.begin: f"{opened} {calls}", self.call: calls}


def read_objects(calls: Calls, char: str | None, any_name: bool) -> Steps:
    """Objects with semicolons or space between them, or a list of objects."""
    if char == "[":
        return (yield from read_array(calls, char, any_name))
    char = yield from after_space((yield from read_object(calls, char, any_name)))
    while char == ";" or char == "{":
        if char == ";":
            char = yield from after_space((yield))
        char = yield from after_space((yield from read_object(calls, char, any_name)))
    return char


def read_array(calls: Calls, char: str | None, any_name: bool) -> Steps:
    """Objects inside brackets."""
    expect("[", char)
    char = yield from after_space((yield))
    if char != "{":
        raise NoCallError
    while char == "{":
        char = yield from after_space((yield from read_object(calls, char, any_name)))
        if char == ",":
            char = yield from after_space((yield))
    expect("]", char)
    return (yield)


def read_object(calls: Calls, char: str | None, any_name: bool) -> Steps:
    """One call: `{"name": …, "arguments": …}`, keys in any order, other keys left out."""
    early: list[str] = []
    name: str | None = None
    expect("{", char)
    char = yield from after_space((yield))
    while char == '"':
        characters: list[str] = []
        char = yield from after_space((yield from read_value(char, characters.append)))
        key = loads(characters)
        expect(":", char)
        char = yield from after_space((yield))
        characters.clear()
        if key in ("arguments", "parameters"):
            char = yield from read_arguments(char, early.append if name is None else calls.argue)
        else:
            char = yield from read_value(char, characters.append)
        if key == "name":
            name = calls.known(loads(characters), any_name)
            calls.begin(name)
            calls.argue("".join(early))
        char = yield from after_space(char)
        if char == ",":
            char = yield from after_space((yield))
    expect("}", char)
    if name is None:
        raise NoCallError
    calls.close_object()
    return (yield)
