"""Tool calls between tags: with named parameters as Qwen3-Coder writes them, or with keys and values as GLM does."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.serve.protocol import Tool
from specdec_cli.serve.tools import arguments
from specdec_cli.serve.tools.call_format import CallFormat, WrittenCall, as_text
from specdec_cli.serve.tools.calls import Calls
from specdec_cli.serve.tools.scanner import NoCallError, Steps, after_space, one_of, quoted, read_body, read_until

if TYPE_CHECKING:
    from specdec_cli.serve.tools.strict_calls import CallGrammar

_NAME = re.compile(r"[\w.\-]{1,128}")


@dataclass(frozen=True)
class TaggedCalls(CallFormat):
    """Calls whose parameters are named in tags, with their values as plain text.

    Args:
        call: before and after a call's name.
        end_call: after its parameters.
        parameter: before and after a parameter's name.
        end_parameter: after its value.
        line: what the format puts around a value.
    """

    call: tuple[str, str] = ("<function=", ">")
    end_call: str = "</function>"
    parameter: tuple[str, str] = ("<parameter=", ">")
    end_parameter: str = "</parameter>"
    line: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """The outer tag, or a first call's own, which models write without the outer one."""
        return self.begin, self.call[0]

    def read(self, calls: Calls, marker: str) -> Steps:
        """Calls after one of the tags."""
        if marker == self.begin:
            yield from one_of((self.call[0],), (yield from after_space((yield))))
        while True:
            name = yield from read_until(self.call[1], (yield), str.isprintable)
            calls.begin(calls.known(name.strip(), any_name=marker == self.begin))
            yield from self._read_parameters(calls)
            calls.close()
            char = yield from after_space((yield))
            if char != "<":
                return char
            ends = yield from one_of((self.end, self.call[0]), char)
            if ends == self.end:
                return (yield)

    def _read_parameters(self, calls: Calls) -> Generator[None, str | None, None]:
        """The parameters of one call, and its closing tag."""
        nexts = (self.end_call, self.parameter[0])
        tag: str | None = yield from one_of(nexts, (yield from after_space((yield))))
        while tag == self.parameter[0]:
            key = yield from read_until(self.parameter[1], (yield), str.isprintable)
            tag = yield from _read_argument(calls, key, self.end_parameter, nexts, is_stripped=True)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        """A section for each call."""
        return "\n".join(
            f"{self.begin}\n{name.join(self.call)}\n"
            + "".join(
                f"{key.join(self.parameter)}{self.line}{as_text(value)}{self.line}{self.end_parameter}\n"
                for key, value in members.items()
            )
            + f"{self.end_call}\n{self.end}"
            for name, _, members in calls
        )

    def sections(self, grammar: CallGrammar) -> dict[str, str]:
        """Calls after the outer tag, and after a call's own."""
        (begin, close), end = self.parameter, self.line + self.end_parameter

        def head(key: str | None) -> str:
            return quoted(begin + (key or "")) + ("" if key is not None else ' /[^>"\\n]+/ ')

        def call(tool: Tool) -> str:
            parameters = grammar.parameters(tool, head, close + self.line, end)
            name = quoted(tool.function.name + self.call[1])
            return f'{name} "\\n"? {parameters} {grammar.mark(self.end_call)} "\\n"?'

        call_rule, opened = grammar.each(call), grammar.mark(self.call[0])
        calls = f"{grammar.many(call_rule, opened)} {grammar.mark(self.end)}"
        return {self.begin: f'"\\n"? {opened} {calls}', self.call[0]: calls}


@dataclass(frozen=True)
class GlmCalls(CallFormat):
    """GLM's calls: the name, then keys and values in tags of their own."""

    def read(self, calls: Calls, marker: str) -> Steps:
        """One call."""
        char = yield
        name = ""
        while char is not None and char != "<":
            name += char
            char = yield
        nexts = ("<arg_key>", self.end)
        tag: str | None = yield from one_of(nexts, char)
        if not _NAME.fullmatch(name.strip()):
            raise NoCallError
        calls.begin(name.strip())
        while tag == "<arg_key>":
            key = (yield from read_until("</arg_key>", (yield))).strip()
            yield from one_of(("<arg_value>",), (yield from after_space((yield))))
            tag = yield from _read_argument(calls, key, "</arg_value>", nexts)
        calls.close()
        return (yield)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        """A section for each call."""
        return "\n".join(
            f"{self.begin}{name}\n"
            + "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n" for key, value in members.items()
            )
            + self.end
            for name, _, members in calls
        )

    def sections(self, grammar: CallGrammar) -> dict[str, str]:
        """One call."""
        opened, closed, value = (grammar.mark(mark) for mark in ("<arg_key>", "</arg_key>", "<arg_value>"))

        def head(key: str | None) -> str:
            name = quoted(key) if key is not None else r"/[^<\n]+/"
            return rf'"\n"? {opened} {name} {closed} "\n"? {value}'

        def call(tool: Tool) -> str:
            return rf'{quoted(tool.function.name)} {grammar.parameters(tool, head, "", "</arg_value>")} "\n"?'

        return {self.begin: f"{grammar.each(call)} {grammar.mark(self.end)}"}


def _read_argument(
    calls: Calls, key: str, end: str, nexts: tuple[str, ...], is_stripped: bool = False
) -> Generator[None, str | None, str]:
    """Read a value up to its closing tag, and return the tag after it, one of `nexts`.

    Raises:
        NoCallError: the output ends before such a tag; the call has what is there.
    """
    characters: list[str] = []
    tag = yield from read_body(end, nexts, characters)
    text = "".join(characters)
    text = text.removeprefix("\n") if is_stripped else text
    if tag is None:
        calls.argument(key, arguments.begun(text, calls.schema, key))
        raise NoCallError
    calls.argument(key, arguments.from_text(text.removesuffix("\n") if is_stripped else text, calls.schema, key))
    if not tag:
        raise NoCallError
    return tag
