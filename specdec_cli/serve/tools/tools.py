"""Tool calls in a model's text: the formats of the model families, whole or as they stream.

One parser reads a text character by character and emits at once what is certain, so that a whole text is a stream of
one piece. What turns out to be no call is given back as the plain text that it was.

| form | a call looks like |
|---|---|
| hermes | `<tool_call>{"name": "f", "arguments": {…}}</tool_call>` (Hermes, Qwen2.5, Qwen3) |
| granite, jamba, phi4_mini_json | the same objects in a list after `<|tool_call|>`, `<tool_calls>` and `functools` |
| qwen3_coder | `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`, values as plain text |
| seed_oss, minimax_m2 | the same with `<seed:tool_call>`; with `<minimax:tool_call><invoke name="f">…` |
| glm45 | `<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>`, values as plain text |
| deepseek | `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…`, V3 and V3.1 |
| kimi_k2 | the same with Kimi's tokens, `functions.f:0` as the name |
| llama3_json | `{"name": "f", "parameters": {…}}` at the beginning, or after `<|python_tag|>`; several joined by `;` |
| pythonic | `[f(x=1), g(y='a')]` at the beginning, or between Llama 4's or LFM2's tokens |
| olmo3 | `<function_calls>f(x=1)</function_calls>` |
| mistral | `[TOOL_CALLS][{"name": "f", "arguments": {…}}]`, or `[TOOL_CALLS]f[ARGS]{…}` |
| named | the whole text is the arguments, forced by a grammar |
| required | `[{"name": "f", "parameters": {…}}]`, forced by a grammar |
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from specdec_cli.serve.tools import json_calls
from specdec_cli.serve.tools.calls import Calls, ToolDelta
from specdec_cli.serve.tools.json_calls import MARKS, TOKENS, MarkedFormat, TokenFormat, read_tokened
from specdec_cli.serve.tools.letters import SPACE, NoCallError, Steps, after_space, expect, one_of
from specdec_cli.serve.tools.python_calls import read_python_calls
from specdec_cli.serve.tools.tag_calls import TAGS, TagFormat, read_glm, read_tagged

Format = MarkedFormat | TagFormat | TokenFormat | Literal["glm45", "llama3_json", "pythonic", "olmo3", "mistral"]
PYTHON_MARKS: Mapping[str, str] = {
    "<|python_start|>": "<|python_end|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<|python_tag|>": "",
}
"""The text before and after bracketed Python calls."""


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How a request's tool calls are read.

    Args:
        form: a format of the model's own; `named` and `required` where a grammar forces the call's JSON.
        schemas: of the tools that may be called, by name; the one of `named` alone.
        only_one: calls after the first are left out (`parallel_tool_calls: false`).
        ids: what calls' ids look like: `short` ones have nine letters and digits, as Mistral's templates demand;
            `numbered` ones are `functions.NAME:0`, which Kimi's templates write in place of the name.
        num_earlier: calls of earlier turns, for numbered ids.
    """

    form: Format | Literal["named", "required"]
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    only_one: bool = False
    ids: Literal["long", "short", "numbered"] = "long"
    num_earlier: int = 0

    @property
    def is_forced(self) -> bool:
        """Whether the whole text is calls."""
        return self.form in ("named", "required")

    def call_id(self, index: int, name: str) -> str:
        """A new call's id.

        Args:
            index: its place in the answer.
            name: of the function.
        """
        if self.ids == "numbered":
            return f"functions.{name}:{self.num_earlier + index}"
        return uuid4().hex[:9] if self.ids == "short" else f"call_{uuid4().hex}"

    def parser(self) -> ToolParser:
        """A fresh parser for one choice."""
        return ToolParser(self)


class ToolParser:
    """Reads one choice's text; how it is cut into pieces changes only where the deltas are cut.

    Args:
        plan: the form, and the tools.
    """

    def __init__(self, plan: ToolPlan) -> None:
        self._plan = plan
        self._only_one = plan.only_one
        self._calls = Calls(plan.schemas)
        self._has_ended = False
        self._run = self._reader(plan)
        next(self._run)

    @property
    def num_calls(self) -> int:
        """How many calls have begun."""
        return self._calls.num_calls

    def feed(self, text: str) -> list[ToolDelta]:
        """Take the next text."""
        for char in text:
            if self._calls.raw is not None:
                self._calls.raw.append(char)
            self._run.send(char)
        return self._drain()

    def finish(self) -> list[ToolDelta]:
        """The text that was held back, once no more follows. Call it once."""
        self._has_ended = True
        with suppress(StopIteration):
            self._run.send(None)
        self._calls.finish()
        return self._drain()

    def _reader(self, plan: ToolPlan) -> Steps:
        calls = self._calls
        if plan.form in MARKS:
            begin, end = MARKS[plan.form]
            return self._marked((begin,), lambda _: json_calls.read_marked(calls, end))
        if plan.form in TAGS:
            tags = TAGS[plan.form]
            return self._marked((tags.begin, tags.call[0]), lambda marker: read_tagged(tags, calls, marker))
        if plan.form in TOKENS:
            tokens = TOKENS[plan.form]
            return self._marked((tokens.begin, tokens.call), lambda marker: read_tokened(tokens, calls, marker))
        readers: Mapping[str, Callable[[], Steps]] = {
            "glm45": lambda: self._marked(("<tool_call>",), lambda _: read_glm(calls)),
            "mistral": lambda: self._marked(("[TOOL_CALLS]",), lambda _: json_calls.read_mistral(calls)),
            "olmo3": lambda: self._marked(("<function_calls>",), lambda _: self._python_lines()),
            "llama3_json": self._llama3,
            "pythonic": self._pythonic,
            "named": self._named,
            "required": self._required,
        }
        return readers[plan.form]()

    def _marked(self, markers: tuple[str, ...], read: Callable[[str], Steps], char: str | None = None) -> Steps:
        """Plain text with calls behind markers."""
        char = char or (yield)
        while (marker := (yield from self._until(markers, char))) is not None:
            char = yield from self._attempt(marker, read(marker))
        return None

    def _llama3(self) -> Steps:
        char = yield from self._say_space()
        if char is not None and char in "{[":
            char = yield from self._attempt("", json_calls.read_objects(self._calls, char, any_name=False), char)
        return (yield from self._marked(("<|python_tag|>",), lambda _: self._tagged_objects(), char))

    def _tagged_objects(self) -> Steps:
        return (yield from json_calls.read_objects(self._calls, (yield from after_space((yield))), any_name=True))

    def _pythonic(self) -> Steps:
        char = yield from self._say_space()
        if char == "[":
            char = yield from self._attempt("", self._bracketed(any_name=False), char)
        return (yield from self._marked(tuple(PYTHON_MARKS), self._bracketed_between, char))

    def _bracketed(self, any_name: bool) -> Steps:
        char = yield from read_python_calls(self._calls, (yield), any_name)
        expect("]", char)
        self._calls.end_text()
        return (yield)

    def _bracketed_between(self, marker: str) -> Steps:
        yield from one_of(("[",), (yield from after_space((yield))))
        char = yield from self._bracketed(any_name=True)
        if not (end := PYTHON_MARKS[marker]):
            return char
        yield from one_of((end,), (yield from after_space(char)))
        return (yield)

    def _python_lines(self) -> Steps:
        char = yield from read_python_calls(self._calls, (yield), any_name=True)
        yield from one_of(("</function_calls>",), char)
        return (yield)

    def _named(self) -> Steps:
        char = yield
        self._calls.begin(next(iter(self._plan.schemas)))
        while char is not None:
            self._calls.argue(char)
            char = yield
        return None

    def _required(self) -> Steps:
        char = yield from self._attempt("", self._whole_array())
        yield from self._until((), char)
        return None

    def _whole_array(self) -> Steps:
        char = yield from after_space((yield))
        return (yield from after_space((yield from json_calls.read_array(self._calls, char, any_name=False))))

    def _say_space(self) -> Steps:
        char = yield
        while char is not None and char in SPACE:
            self._calls.say(char)
            char = yield
        return char

    def _attempt(self, begun: str, read: Steps, char: str | None = None) -> Steps:
        """Read calls; what turns out to be none is plain text again, unless a call has begun with it.

        Args:
            begun: the marker that was read already.
            read: the calls after it.
            char: a character that was read already, and that `read` has been given or has asked for.
        """
        calls = self._calls
        calls.raw = [*begun, *(char or "")]
        try:
            return (yield from read)
        except NoCallError:
            last = None if self._has_ended else calls.raw.pop()
            for letter in () if calls.is_open else calls.raw:
                calls.say(letter)
            return last
        finally:
            calls.raw, calls.is_open = None, False

    def _until(self, markers: tuple[str, ...], char: str | None) -> Generator[None, str | None, str | None]:
        """Plain text up to one of some markers; which one came. Without markers, to the end."""
        seen = ""
        while char is not None:
            seen += char
            while seen and not any(marker.startswith(seen) for marker in markers):
                self._calls.say(seen[0])
                seen = seen[1:]
            if seen in markers:
                return seen
            char = yield
        for letter in seen:
            self._calls.say(letter)
        return None

    def _drain(self) -> list[ToolDelta]:
        """The deltas so far, with neighbours of one kind joined."""
        joined: list[ToolDelta] = []
        for one in self._calls.out:
            if self._only_one and one.index > 0:
                continue
            last = joined[-1] if joined else None
            if last is not None and last.content and one.content:
                joined[-1] = ToolDelta(last.content + one.content)
            elif last is not None and one.arguments and not last.content and last.index == one.index:
                joined[-1] = ToolDelta(index=one.index, name=last.name, arguments=last.arguments + one.arguments)
            else:
                joined.append(one)
        self._calls.out.clear()
        return joined
