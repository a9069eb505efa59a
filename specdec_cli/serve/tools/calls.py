"""The calls of one text as they are read: deltas for the answer, and what is known about the tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdec_cli.serve.tools.scanner import SPACE, NoCallError


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


@dataclass(slots=True)
class Calls:
    """Collects plain text and calls in the order in which they are read.

    Args:
        schemas: the tools' JSON schemas by name.
        num_calls: how many have begun.
        out: what was read.
        raw: while calls are read, the characters since the last one ended, for text that turns out to be no call.
        is_open: whether a call has begun and not ended.
    """

    schemas: Mapping[str, Mapping[str, Any]]
    num_calls: int = 0
    out: list[ToolDelta] = field(default_factory=list)
    raw: list[str] | None = None
    is_open: bool = False
    _name: str = ""
    _has_arguments: bool = False
    _space: str = ""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The JSON schema of the current call's arguments; empty for an unknown tool."""
        return self.schemas.get(self._name, {})

    def known(self, name: Any, any_name: bool) -> str:
        """A call's name.

        Raises:
            NoCallError: it is none, or that of no tool where only theirs begin a call.
        """
        if not isinstance(name, str) or not name or not (any_name or name in self.schemas):
            raise NoCallError
        return name

    def begin(self, name: str) -> None:
        """A call begins; white space before it is dropped."""
        self._space = ""
        self._name = name
        self._has_arguments = False
        self.is_open = True
        self.out.append(ToolDelta(index=self.num_calls, name=name))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        """The next piece of the current call's arguments."""
        if text:
            self._has_arguments = True
            self.out.append(ToolDelta(index=self.num_calls - 1, arguments=text))

    def argument(self, key: str, value: str) -> None:
        """One argument whose value is JSON, or the beginning of JSON where the text ends there."""
        self.argue(f"{', ' if self._has_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: {value}")

    def close(self) -> None:
        """The call's arguments end, if they were given one by one."""
        self.argue("}" if self._has_arguments else "{}")
        self.end_text()

    def close_object(self, next_char: str | None = None) -> None:
        """The call's arguments were one JSON object, or none were given."""
        self.argue("" if self._has_arguments else "{}")
        self.end_text(next_char)

    def end_text(self, next_char: str | None = None) -> None:
        """The text up to here belongs to calls, except for one character that was read ahead."""
        self.is_open = False
        if self.raw is not None:
            self.raw[:] = next_char or ""

    def say(self, char: str) -> None:
        """Plain text; white space is held back, because it is dropped before a call."""
        if char in SPACE:
            self._space += char
            return
        self.out.append(ToolDelta(self._space + char))
        self._space = ""

    def finish(self) -> None:
        """Give back the white space at the end of a text without calls."""
        if self._space and not self.num_calls:
            self.out.append(ToolDelta(self._space))
