"""YAML read safely, with the line and column of every key and value.

Values are built here from YAML's events, not by PyYAML's constructors: so aliases never expand, tags never call
anything, and `no`, `010` or `2024-01-01` stay the text that was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from specdec_cli.files import encoding_of
from specdec_cli.recipe.problems import Key, Path, Problem, RecipeError

MAX_BYTES = 1 << 20
MAX_DEPTH = 24
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_UNPRINTABLE = re.compile("[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_KEY = re.compile(r":(\s|$)|^\s*[-\[{}\]\"']")  # a key with its colon, or what begins with no key
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """A place in a file; lines and columns count from 1."""

    line: int
    column: int


@dataclass(slots=True)
class Document:
    """A recipe's text as plain values, and where each stands.

    Args:
        source: the file's name in messages.
        value: the root mapping.
        values: path to the value's place.
        keys: path to the key's place.
        problems: what was refused while the rest could still be read.
        refused: paths with refused values, which get no further errors.
    """

    source: str
    value: Any = None
    values: dict[Path, Mark] = field(default_factory=dict)
    keys: dict[Path, Mark] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    refused: set[Path] = field(default_factory=set)

    def problem(self, mark: Mark, message: str, hint: str | None = None) -> Problem:
        """A problem at a place of this document."""
        return Problem(message, hint, f"{self.source}:{mark.line}:{mark.column}", (mark.line, mark.column))


def plain_value(text: str) -> Any:
    """The value of an unquoted scalar: null, true, false, a decimal integer, a float; else the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    if re.fullmatch(r"[-+]?(0|[1-9][0-9]{0,30})", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", text) and re.search(r"[.eE]", text):
        return float(text)
    if re.fullmatch(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)|nan|[-+]?inf", text):
        return float(text.replace(".", ""))
    return text


def read_document(data: bytes, source: str) -> Document:
    """Read a recipe's bytes.

    Raises:
        RecipeError: too large, no UTF-8, no YAML, or a root that is no mapping. Refused anchors, aliases, tags and
            duplicate keys are left in `problems` so that all errors can be shown at once.
    """
    document = Document(source)
    if len(data) > MAX_BYTES:
        raise RecipeError([Problem(f"`{source}` is larger than 1 MiB", "a recipe is a small YAML file")])
    text = _decoded(data, document)
    try:
        _Builder(document, yaml.parse(text, Loader=_Loader), text.split("\n")).run()
    except yaml.MarkedYAMLError as error:
        raise RecipeError([*document.problems, _syntax_problem(error, text, document)]) from None
    except yaml.YAMLError as error:
        raise RecipeError([document.problem(Mark(1, 1), f"not YAML: {_first_line(str(error))}")]) from None
    return document


def _decoded(data: bytes, document: Document) -> str:
    encoding = encoding_of(data)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        before = data[: error.start].decode(encoding, "replace")
        mark = _mark_at(before, len(before))
        message = f"byte `0x{data[error.start]:02x}` is not {encoding.removesuffix('-sig').upper()}"
        raise RecipeError([document.problem(mark, message, "save the file as UTF-8")]) from None
    if unprintable := _UNPRINTABLE.search(text):
        mark = _mark_at(text, unprintable.start())
        raise RecipeError([document.problem(mark, f"control character `U+{ord(unprintable[0]):04X}` is not allowed")])
    return text


def _mark_at(text: str, offset: int) -> Mark:
    return Mark(text.count("\n", 0, offset) + 1, offset - (text.rfind("\n", 0, offset) + 1) + 1)


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def _syntax_problem(error: yaml.MarkedYAMLError, text: str, document: Document) -> Problem:
    place = error.problem_mark or error.context_mark
    mark = Mark(place.line + 1, place.column + 1) if place else Mark(1, 1)
    lines = text.split("\n")
    line = lines[mark.line - 1] if mark.line <= len(lines) else ""
    tab = line.find("\t")
    if 0 <= tab < mark.column:
        return document.problem(Mark(mark.line, tab + 1), "a tab cannot separate or indent in YAML", "use spaces")
    if (without := _line_without_colon(error, mark.line, lines)) is not None:
        return _no_colon(document, without, lines[without - 1])
    return document.problem(mark, f"not YAML: {_first_line(error.problem or error.context or 'cannot be read')}")


def _line_without_colon(error: yaml.MarkedYAMLError, number: int, lines: list[str]) -> int | None:
    """The line of a key without its colon, which YAML notices further down; None for other errors."""
    message = error.problem or ""
    if "could not find expected ':'" in message and error.context_mark is not None:
        return int(error.context_mark.line) + 1
    if "mapping values are not allowed" not in message and "did not find expected key" not in message:
        return None
    above = range(number - 1, 0, -1)
    before = next((line for line in above if not re.match(r"\s*(#|$)", lines[line - 1])), None)
    return before if before is not None and not _KEY.search(lines[before - 1]) else None


def _no_colon(document: Document, number: int, line: str) -> Problem:
    text = line.strip()
    key, _, value = text.partition(" ")
    mark = Mark(number, len(line) - len(line.lstrip()) + 1)
    return document.problem(mark, f"`{text}` has no colon", f"write `{key}:{f' {value.strip()}' if value else ''}`")


class _Builder:
    """Turns YAML events into values; notes and steps over what is refused."""

    def __init__(self, document: Document, events: Iterator[Any], lines: list[str]) -> None:
        self._document = document
        self._lines = lines
        self._events = events

    def run(self) -> None:
        document = self._document
        next(self._events)  # the stream's start
        if isinstance(next(self._events), yaml.StreamEndEvent):
            raise RecipeError(
                [document.problem(Mark(1, 1), "the recipe is empty", "`specdec recipe list` shows examples")]
            )
        root = next(self._events)
        document.value = self._value(root, ())
        next(self._events)  # the document's end
        after = next(self._events)
        if isinstance(after, yaml.DocumentStartEvent):
            document.problems.append(
                document.problem(_mark(after), "a recipe is one YAML document, a second begins here")
            )
            for _ in self._events:
                pass
        if not isinstance(document.value, dict) and () not in document.refused:
            hint = "begin with a section such as `target:`"
            document.problems.append(document.problem(_mark(root), "a recipe is a mapping of sections", hint))
        if not isinstance(document.value, dict):
            raise RecipeError(document.problems)

    def _value(self, event: Any, path: Path) -> Any:
        self._document.values[path] = _mark(event)
        if isinstance(event, yaml.AliasEvent):
            return self._refuse(
                event, path, f"alias `*{event.anchor}` is not allowed in a recipe", "write the value out"
            )
        if event.anchor is not None:
            self._refuse(event, path, f"anchor `&{event.anchor}` is not allowed in a recipe", "leave it out")
        if event.tag is not None:
            self._refuse(event, path, f"tag `{event.tag}` is not allowed in a recipe", "leave it out")
        if len(path) >= MAX_DEPTH:
            problem = self._document.problem(_mark(event), f"nested deeper than {MAX_DEPTH} levels")
            raise RecipeError([*self._document.problems, problem])
        if isinstance(event, yaml.ScalarEvent):
            last = _last_line(event)
            if _is_plain(event) and last >= _mark(event).line and not _KEY.search(self._lines[last]):
                self._document.refused.add(path)
                self._document.problems.append(_no_colon(self._document, last + 1, self._lines[last]))
            return plain_value(event.value) if _is_plain(event) else event.value
        return self._sequence(path) if isinstance(event, yaml.SequenceStartEvent) else self._mapping(path)

    def _refuse(self, event: Any, path: Path, message: str, hint: str) -> None:
        self._document.refused.add(path)
        self._document.problems.append(self._document.problem(_mark(event), message, hint))

    def _sequence(self, path: Path) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._value(event, (*path, len(items))))
        return items

    def _mapping(self, path: Path) -> dict[Key, Any]:
        items: dict[Key, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._key(event, path)
            here = (*path, key)
            if key in items:
                first = self._document.keys[here].line
                message = f"duplicate key `{key}`, first in line {first}"
                self._document.problems.append(self._document.problem(_mark(event), message, "keep one of them"))
                self._value(next(self._events), (*path, f"{key} again"))
                continue
            self._document.keys[here] = _mark(event)
            items[key] = self._value(next(self._events), here)
        return items

    def _key(self, event: Any, path: Path) -> Key:
        if not isinstance(event, yaml.ScalarEvent) or event.anchor is not None or event.tag is not None:
            message = "a key is a plain word: no alias, anchor, tag, list or mapping"
            raise RecipeError([*self._document.problems, self._document.problem(_mark(event), message)])
        value = plain_value(event.value) if _is_plain(event) else event.value
        return value if isinstance(value, int) and not isinstance(value, bool) else str(event.value)


def _is_plain(event: Any) -> bool:
    return not event.style  # libyaml's binding says "" where pure Python says None


def _last_line(event: Any) -> int:
    """The line in which an event ends, counted from 0."""
    return int(event.end_mark.line)


def _mark(event: Any) -> Mark:
    return Mark(event.start_mark.line + 1, event.start_mark.column + 1)
