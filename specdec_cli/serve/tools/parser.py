"""Reads tool calls out of a model's text, whole or as it streams.

One parser reads a text character by character and emits at once what is certain, so that a whole text is a stream of
one piece. What turns out to be no call is given back as the plain text that it was. Besides the models' own formats
there are two that a grammar forces: `named`, where the whole text is the arguments, and `required`, a list
`[{"name": "f", "parameters": {…}}]`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from uuid import uuid4

from specdec_cli.serve.tools.call_format import CallFormat
from specdec_cli.serve.tools.calls import Calls, ToolDelta
from specdec_cli.serve.tools.formats import FORMATS
from specdec_cli.serve.tools.json_calls import read_array
from specdec_cli.serve.tools.scanner import SPACE, NoCallError, Steps, after_space


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How a request's tool calls are read.

    Args:
        form: name of the model's own format; `named` and `required` where a grammar forces the call's JSON.
        schemas: of the tools that may be called, by name; the one of `named` alone.
        only_one: calls after the first are left out (`parallel_tool_calls: false`).
        ids: how ids of calls look, as in `CallFormat`.
        num_earlier: calls of earlier turns, for numbered ids.
    """

    form: str
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
    """Reads one choice's text; how it is cut into pieces changes only where the deltas are cut."""

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
        if plan.form == "named":
            return self._named()
        return self._required() if plan.form == "required" else self._of_format(FORMATS[plan.form])

    def _of_format(self, form: CallFormat) -> Steps:
        """Calls of a format: at the beginning, where it takes them there, and behind its markers."""
        char: str | None = None
        if form.bare_starts:
            char = yield from self._say_space()
            if char is not None and char in form.bare_starts:
                char = yield from self._attempt("", form.read_bare(self._calls, char), char)
        return (yield from self._marked(form.markers, partial(form.read, self._calls), char))

    def _marked(self, markers: tuple[str, ...], read: Callable[[str], Steps], char: str | None = None) -> Steps:
        """Plain text with calls behind markers."""
        char = char or (yield)
        while (marker := (yield from self._until(markers, char))) is not None:
            char = yield from self._attempt(marker, read(marker))
        return None

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
        return (yield from after_space((yield from read_array(self._calls, char, any_name=False))))

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
        for delta in self._calls.out:
            if self._only_one and delta.index > 0:
                continue
            last = joined[-1] if joined else None
            if last is not None and last.content and delta.content:
                joined[-1] = ToolDelta(last.content + delta.content)
            elif last is not None and delta.arguments and not last.content and last.index == delta.index:
                joined[-1] = ToolDelta(index=delta.index, name=last.name, arguments=last.arguments + delta.arguments)
            else:
                joined.append(delta)
        self._calls.out.clear()
        return joined
