"""The problems of a recipe, one sentence each: pydantic's errors in plain English."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_cli.errors import UsageError, did_you_mean

Key = str | int
Path = tuple[Key, ...]
OPTION = (1 << 30, 3)
"""Order of problems with options other than `--set`, which concern no key that the user wrote."""

_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
}
BOUND_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
"""pydantic's bounds in words."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Fault of a recipe.

    Args:
        message: the sentence, without its place.
        hint: what to do, or None.
        where: `file:line:column`, or None for a flag or a variable, which the sentence names.
        order: sorts problems: line and column in a file; what stands in no file comes after.
    """

    message: str
    hint: str | None = None
    where: str | None = None
    order: tuple[int, int] = (1 << 30, 0)

    def __str__(self) -> str:
        """The sentence with its place."""
        return f"{self.where}: {self.message}" if self.where else self.message


class RecipeError(UsageError):
    """A recipe, or what overrides it, is wrong; the message has one line per problem, in order of position."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(problems, key=lambda problem: problem.order)
        assert self.problems, "a RecipeError says what is wrong"
        hints = list(dict.fromkeys(problem.hint for problem in self.problems if problem.hint))
        many = SEVERAL_HINTS if any(problem.order < OPTION for problem in self.problems) else _OPTIONS_HINT
        super().__init__("\n".join(map(str, self.problems)), hints[0] if len(hints) == 1 else many)


_OPTIONS_HINT = "`--help-all` explains every option"
SEVERAL_HINTS = "`specdec recipe schema` lists every key; `specdec recipe show NAME` prints a recipe that works"


def shown(value: Any) -> str:
    """A value as a message shows it, in backticks, on one line and not longer than it helps."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    text = "".join(letter if letter.isprintable() else "�" for letter in text)
    return f"`{text if len(text) <= 60 else text[:57] + '…'}`"


def sentence(error: Mapping[str, Any], subject: str, known: Sequence[str]) -> str:
    """A pydantic error as a sentence.

    Args:
        error: one of `ValidationError.errors()`.
        subject: as the user wrote it, in backticks: a key's path, a flag, a variable.
        known: the keys that would have been right, for an unknown one.
    """
    kind, value, context = error["type"], error.get("input"), error.get("ctx", {})
    if kind == "extra_forbidden":
        key = error["loc"][-1]
        return f"unknown key `{key}` in {subject}{did_you_mean(key, known)}"
    if error["loc"][-1] == "[key]":
        return f"{subject} must have {'text' if kind == 'string_type' else 'a whole number'} as its key"
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ")
        return f"{subject} must be one of {choices}, not {shown(value)}{did_you_mean(value, choices.split(', '))}"
    if kind == "string_too_short":
        return f"{subject} must not be empty"
    if kind == "string_unicode":
        return f"{subject} must be Unicode text, not {shown(value)}"
    return f"{subject} {_expected(kind, error['msg'], value, context)}"


def _expected(kind: str, message: str, value: Any, context: Mapping[str, Any]) -> str:
    if bound := next((name for name in BOUND_WORDS if name in context), None):
        return f"must be {BOUND_WORDS[bound]} {context[bound]}, not {shown(value)}"
    if kind in _TYPES:
        text = "the text " if isinstance(value, str) else ""
        return f"must be {_TYPES[kind]}, not {text}{shown(value)}{_quotes(kind, value)}"
    return message if "not " in message else f"{message}, not {shown(value)}"


def _quotes(kind: str, value: Any) -> str:
    if kind == "string_type" and isinstance(value, int | float):
        return "; put it in quotes"
    return ""
