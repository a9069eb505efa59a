"""Tool calls in a model's text: the formats of Hermes/Qwen, Llama-3 and Mistral, whole or as they stream.

One parser reads a text character by character and says at once what is certain, so that a whole text is a stream of
one piece. What turns out to be no call is given back as the plain text that it was.

| form | a call looks like |
|---|---|
| hermes | `<tool_call>{"name": "f", "arguments": {…}}</tool_call>` |
| llama3 | `{"name": "f", "parameters": {…}}` at the beginning, or after `<|python_tag|>`; several joined by `;` |
| mistral | `[TOOL_CALLS][{"name": "f", "arguments": {…}}]`, or `[TOOL_CALLS]f[ARGS]{…}` |
| named | the whole text is the arguments, forced by a grammar |
| required | `[{"name": "f", "parameters": {…}}]`, forced by a grammar |
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

from specdec_cli.serve.letters import SPACE, NoCallError, Steps, after_space, expect, loads, read_arguments, read_value

Format = Literal["hermes", "llama3", "mistral"]
FORMATS: tuple[Format, ...] = get_args(Format)
_MARKERS: Mapping[Format, str] = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": "<|python_tag|>"}


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of the model's answer.

    Args:
        content: plain text.
        index: of the call that `name` or `arguments` belong to.
        name: begins a call.
        arguments: the next piece of its arguments' JSON.
    """

    content: str = ""
    index: int = 0
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How a request's tool calls are read.

    Args:
        form: a format of the model's own; `named` and `required` where a grammar forces the call's JSON.
        names: of the tools that may be called; the one of `named` alone.
        only_one: calls after the first are left out (`parallel_tool_calls: false`).
    """

    form: Format | Literal["named", "required"]
    names: tuple[str, ...]
    only_one: bool = False

    def parser(self) -> ToolParser:
        """A fresh parser for one choice."""
        return ToolParser(self)


def find_format(chat_template: str) -> Format | None:
    """The format that a chat template asks for; None where it has no tool calls."""
    for form, marker in _MARKERS.items():
        if marker in chat_template:
            return form
    return "llama3" if "tools" in chat_template and '"parameters":' in chat_template else None


class ToolParser:
    """Reads one choice's text; how it is cut into pieces changes only where the deltas are cut.

    Args:
        plan: the form, and the tools' names.
    """

    def __init__(self, plan: ToolPlan) -> None:
        self.num_calls = 0
        self._names = frozenset(plan.names)
        self._only_one = plan.only_one
        self._out: list[ToolDelta] = []
        self._raw: list[str] | None = None
        self._space = ""
        self._has_arguments = False
        self._has_ended = False
        readers: Mapping[str, Callable[[], Steps]] = {
            "hermes": lambda: self._marked("<tool_call>", self._closed_object),
            "mistral": lambda: self._marked("[TOOL_CALLS]", self._listed_or_named),
            "llama3": self._llama3,
            "named": lambda: self._named(plan.names[0]),
            "required": self._required,
        }
        self._run = readers[plan.form]()
        next(self._run)

    def feed(self, text: str) -> list[ToolDelta]:
        """Take the next text."""
        for char in text:
            if self._raw is not None:
                self._raw.append(char)
            self._run.send(char)
        return self._drain()

    def finish(self) -> list[ToolDelta]:
        """What was held back, when no text follows; call once."""
        self._has_ended = True
        with suppress(StopIteration):
            self._run.send(None)
        if self._space and not self.num_calls:
            self._out.append(ToolDelta(self._space))
        return self._drain()

    def _marked(self, marker: str, calls: Callable[[], Steps]) -> Steps:
        """Plain text with calls behind markers."""
        char = yield
        while (yield from self._until(marker, char)):
            char = yield from self._attempt(marker, calls)
        return None

    def _closed_object(self) -> Steps:
        char = yield from self._object((yield from after_space((yield))), any_name=True)
        char = yield from after_space(char)
        for letter in "</tool_call>":
            if char != letter:
                break
            char = yield
        return char

    def _listed_or_named(self) -> Steps:
        char = yield from after_space((yield))
        if char == "[":
            return (yield from self._array(char, any_name=True))
        name = ""
        while char is not None and char not in "[{":
            name += char
            char = yield
        while char is not None and char != "{":  # [CALL_ID]…[ARGS]
            char = yield
        if char is None or not name.strip():
            raise NoCallError
        self._begin(name.strip())
        return (yield from read_value(char, self._argue))

    def _llama3(self) -> Steps:
        char = yield
        while char is not None and char in SPACE:
            self._say(char)
            char = yield
        if char == "{":
            char = yield from self._attempt("{", lambda: self._objects("{", any_name=False))
        while (yield from self._until("<|python_tag|>", char)):
            char = yield from self._attempt("<|python_tag|>", self._tagged_objects)
        return None

    def _tagged_objects(self) -> Steps:
        return (yield from self._objects((yield from after_space((yield))), any_name=True))

    def _objects(self, char: str | None, any_name: bool) -> Steps:
        """Objects with semicolons or space between them."""
        char = yield from after_space((yield from self._object(char, any_name)))
        while char == ";" or char == "{":
            if char == ";":
                char = yield from after_space((yield))
            char = yield from after_space((yield from self._object(char, any_name)))
        return char

    def _named(self, name: str) -> Steps:
        char = yield
        self._begin(name)
        while char is not None:
            self._argue(char)
            char = yield
        return None

    def _required(self) -> Steps:
        char = yield from self._attempt("", self._whole_array)
        yield from self._until("", char)
        return None

    def _whole_array(self) -> Steps:
        char = yield from self._array((yield from after_space((yield))), any_name=False)
        return (yield from after_space(char))

    def _array(self, char: str | None, any_name: bool) -> Steps:
        """Objects inside brackets."""
        expect("[", char)
        char = yield from after_space((yield))
        while char == "{":
            char = yield from after_space((yield from self._object(char, any_name)))
            if char == ",":
                char = yield from after_space((yield))
        expect("]", char)
        return (yield)

    def _object(self, char: str | None, any_name: bool) -> Steps:
        """One call: `{"name": …, "arguments": …}`, keys in any order, other keys left out."""
        early: list[str] = []
        name: str | None = None
        expect("{", char)
        char = yield from after_space((yield))
        while char == '"':
            said: list[str] = []
            char = yield from after_space((yield from read_value(char, said.append)))
            key = loads(said)
            expect(":", char)
            char = yield from after_space((yield))
            said.clear()
            if key in ("arguments", "parameters"):
                char = yield from read_arguments(char, early.append if name is None else self._argue)
            else:
                char = yield from read_value(char, said.append)
            if key == "name":
                name = self._known(loads(said), any_name)
                self._begin(name)
                self._argue("".join(early))
            char = yield from after_space(char)
            if char == ",":
                char = yield from after_space((yield))
        expect("}", char)
        if name is None:
            raise NoCallError
        self._argue("" if self._has_arguments else "{}")
        return (yield)

    def _attempt(self, begun: str, calls: Callable[[], Steps]) -> Steps:
        """Read calls; what turns out to be none before it has begun is plain text again."""
        num_before, self._raw = self.num_calls, [begun]
        try:
            return (yield from calls())
        except NoCallError:
            last = None if self._has_ended else self._raw.pop()
            for char in "".join(self._raw) if self.num_calls == num_before else "":
                self._say(char)
            return last
        finally:
            self._raw = None

    def _until(self, marker: str, char: str | None) -> Generator[None, str | None, bool]:
        """Plain text up to a marker; whether it came. Without a marker, to the end."""
        seen = ""
        while char is not None:
            seen += char
            while seen and not marker.startswith(seen):
                self._say(seen[0])
                seen = seen[1:]
            if seen and seen == marker:
                return True
            char = yield
        for letter in seen:
            self._say(letter)
        return False

    def _known(self, name: Any, any_name: bool) -> str:
        if not isinstance(name, str) or not (any_name or name in self._names):
            raise NoCallError
        return name

    def _say(self, char: str) -> None:
        """Plain text; space is kept back, for it is none of the text before a call."""
        if char in SPACE:
            self._space += char
            return
        self._out.append(ToolDelta(self._space + char))
        self._space = ""

    def _begin(self, name: str) -> None:
        self._space = ""
        self._has_arguments = False
        self._out.append(ToolDelta(index=self.num_calls, name=name))
        self.num_calls += 1

    def _argue(self, text: str) -> None:
        if text:
            self._has_arguments = True
            self._out.append(ToolDelta(index=self.num_calls - 1, arguments=text))

    def _drain(self) -> list[ToolDelta]:
        """The deltas so far, neighbours of a kind joined."""
        joined: list[ToolDelta] = []
        for one in self._out:
            if self._only_one and one.index > 0:
                continue
            last = joined[-1] if joined else None
            if last is not None and last.content and one.content:
                joined[-1] = ToolDelta(last.content + one.content)
            elif last is not None and one.arguments and not last.content and last.index == one.index:
                joined[-1] = ToolDelta(index=one.index, name=last.name, arguments=last.arguments + one.arguments)
            else:
                joined.append(one)
        self._out = []
        return joined
