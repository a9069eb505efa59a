"""A format of tool calls: one object reads, writes and constrains the calls of a family of models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from specdec_cli.serve.tools.calls import Calls
    from specdec_cli.serve.tools.scanner import Steps
    from specdec_cli.serve.tools.strict_calls import CallGrammar

WrittenCall = tuple[str, str, Mapping[str, Any]]
"""A call's name, the text of its arguments, and what can be read of them."""


@dataclass(frozen=True)
class CallFormat:
    """A format; its subclasses are the shapes of calls, and their instances what families write.

    Args:
        begin: text before calls.
        end: text after them; empty where they end by themselves.
        written: pattern of a call in a template's text; `NAME` stands for the function.
        bare: the same at the beginning of a turn, for calls that need no text before them.
        instructions: pattern of the explanation that a template gives, where that shows no call.
        bare_starts: characters of which a call without text before it begins with one.
        parsers: its names in `--tool-call-parser`, which are vLLM's; without any, its own name is the only one.
        ids: how ids of calls look: `short` ones have nine letters and digits, as Mistral's templates demand;
            `numbered` ones are `functions.NAME:0`, which Kimi's templates write in place of the name.
    """

    begin: str
    end: str = ""
    written: str = ""
    bare: str = ""
    instructions: str = ""
    bare_starts: str = ""
    parsers: tuple[str, ...] = ()
    ids: Literal["long", "short", "numbered"] = "long"

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that begin calls."""
        return (self.begin,)

    def read(self, calls: Calls, marker: str) -> Steps:
        """Read calls after a marker."""
        raise NotImplementedError

    def read_bare(self, calls: Calls, char: str | None) -> Steps:
        """Read calls at the beginning of a text, of which `char` is the first character."""
        raise NotImplementedError

    def write(self, calls: Sequence[WrittenCall]) -> str:
        """The text of calls, one at least, for the history of a chat template that reads no calls."""
        raise NotImplementedError

    def sections(self, grammar: CallGrammar) -> dict[str, str]:
        """Rules of what follows each marker."""
        raise NotImplementedError

    def bare_calls(self, grammar: CallGrammar) -> str:
        """The rule of calls without a marker."""
        raise NotImplementedError


def written_objects(calls: Sequence[WrittenCall], key: str = "arguments") -> list[str]:
    """Calls as JSON objects."""
    return [f'{{"name": {json.dumps(name)}, "{key}": {text or "{}"}}}' for name, text, _ in calls]


def as_text(value: Any) -> str:
    """An argument as plain text: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else as_json(value)


def as_json(value: Any) -> str:
    """JSON with every character as it is."""
    return json.dumps(value, ensure_ascii=False)
