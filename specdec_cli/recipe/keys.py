"""Keys of the schema by their paths, and checks of single values against their keys."""

from __future__ import annotations

import math
import operator as op
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from specdec_cli.errors import UsageError
from specdec_cli.recipe.problems import BOUND_WORDS
from specdec_cli.recipe.schema import DEFAULT_DRAFT, Recipe, Section


def section_class(section: str) -> type[Section] | None:
    """The class of a section, or None if there is no such section."""
    field = Recipe.model_fields.get(section)
    owner: Any = field.annotation if field else None
    return owner if owner is None or issubclass(owner, Section) else None


def _field(path: str) -> FieldInfo:
    """The declaration of `section.key`."""
    section, key = path.split(".")
    owner = section_class(section)
    assert owner is not None, f"`{path}` is in a section of the recipe"
    return owner.model_fields[key]


def describe(path: str) -> str:
    """The words that say what `section.key` means."""
    return _field(path).description or ""


def default_of(path: str) -> Any:
    """The value that `section.key` has where nothing sets it; for `draft` the model's name."""
    return DEFAULT_DRAFT if path == "draft" else _field(path).get_default(call_default_factory=True)


def kinds_of(path: str) -> set[Any]:
    """The types that `section.key` takes beside null, without their further constraints."""
    section, key = path.split(".")
    owner = section_class(section)
    field = owner.model_fields.get(key) if owner else None
    return flat_kinds(field.annotation) - {NoneType} if field else set()


def flat_kinds(annotation: Any) -> set[Any]:
    """The members of a union, each without its constraints."""
    if get_origin(annotation) is Annotated:
        return flat_kinds(get_args(annotation)[0])
    parts = get_args(annotation)
    is_union = get_origin(annotation) in (Union, UnionType)
    return set().union(*map(flat_kinds, parts)) if parts and is_union else {annotation}


def literal_words(annotation: Any) -> list[str]:
    """The words that a key takes; empty for a key that takes other values."""
    return [word for kind in flat_kinds(annotation) if get_origin(kind) is Literal for word in get_args(kind)]


def check_ranges(made: object, *sections: type[Section], without: str = "") -> None:
    """Refuse fields of an object, but for one, as `check_value` does, each by the key of the same name."""
    for section in sections:
        for key in (key for key in section.model_fields if key != without):
            check_value(section, key, getattr(made, key, None))


def check_value(section: type[Section], key: str, value: Any) -> None:
    """Refuse a value, unless it is None, that is none of a key's words or outside its bounds.

    Raises:
        UsageError: it is, by the key's name.
    """
    if value is None:
        return
    field = section.model_fields[key]
    words = literal_words(field.annotation)
    if words and value not in words:
        raise UsageError(f"{key} is out of range: `{value}`", f"one of {', '.join(words)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{key} must be a finite number, not `{value}`")
    for bound in field.metadata:
        for name, meaning in BOUND_WORDS.items():
            if hasattr(bound, name) and not getattr(op, name)(value, getattr(bound, name)):
                hint = f"it must be {meaning} {getattr(bound, name)}"
                raise UsageError(f"{key} is out of range: `{value}`", hint)
