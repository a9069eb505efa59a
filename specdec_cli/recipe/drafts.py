"""Several drafts for one target: each resolved as if the recipe named it alone, with its own origins and positions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdec_cli.recipe.document import Document, Mark
from specdec_cli.recipe.draft import DraftMethods
from specdec_cli.recipe.layers import PREFIX
from specdec_cli.recipe.problems import Path, RecipeError
from specdec_cli.recipe.resolve import Resolved, read_recipe, resolve_document
from specdec_cli.recipe.schema import MODEL_KEYS

_DRAFT = "draft"


def resolve_drafts(
    name: str | os.PathLike[str] | None = None,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[Any, str]] | None = None,
    methods: DraftMethods | None = None,
) -> list[Resolved]:
    """A checked recipe for every draft, alike in everything else; flags go before the recipe's list.

    Loading options of draft models (`draft.dtype`, …) apply to all of them, and not to drafts without a model.

    Args:
        name: a shipped recipe's name or a file, whose `draft` may be a list; None starts from the defaults.
        sets: `key.path=value`, the last of equal ones wins.
        environment: variables; None reads none.
        flags: path to (value, option's name); `draft` takes a list of mappings.
        methods: drafting methods.

    Raises:
        RecipeError: everything that is wrong with any of them.
    """
    document, flags, environment = read_recipe(name), dict(flags or {}), environment or {}
    listed = _listed(document)
    named, flag = flags.pop(_DRAFT, ([], ""))
    if named and listed:
        _resolve_all([(single, (), {}, {}) for single in listed], methods)  # an override never hides a mistake
        document, listed = _without_draft(document), []
    drafts: list[tuple[Document | None, Mapping[str, Any]]] = [(single, _value(single)) for single in listed]
    if named:
        drafts = [(document, draft) for draft in named]
    if not drafts:
        return [resolve_document(document, sets, environment, flags, methods)]
    some_load = any(_is_model(draft) for _, draft in drafts)
    runs = []
    for single, draft in drafts:
        own_flags, variables, own_sets = flags, environment, sets
        if some_load and not _is_model(draft):
            own_flags = {path: value for path, value in flags.items() if path not in _LOADING}
            variables = {key: value for key, value in environment.items() if key not in _VARIABLES}
            own_sets = [text for text in sets if text.partition("=")[0].strip() not in _LOADING]
        runs.append((single, own_sets, variables, own_flags | ({_DRAFT: (draft, flag)} if named else {})))
    return _resolve_all(runs, methods)


_LOADING = {f"{_DRAFT}.{key}" for key in MODEL_KEYS}
_VARIABLES = {f"{PREFIX}{_DRAFT}_{key}".upper() for key in MODEL_KEYS}


def _resolve_all(
    runs: Sequence[tuple[Document | None, Sequence[str], Mapping[str, str], Mapping[str, tuple[Any, str]]]],
    methods: DraftMethods | None,
) -> list[Resolved]:
    """Resolve each. Problems outside the draft are reported once."""
    resolved, problems = [], []
    for document, sets, environment, flags in runs:
        try:
            resolved.append(resolve_document(document, sets, environment, flags, methods))
        except RecipeError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise RecipeError(problems)
    return resolved


def _listed(document: Document | None) -> list[Document]:
    """The recipe once for each draft of its list; none where its draft is no list."""
    drafts = document.value.get(_DRAFT) if document is not None and isinstance(document.value, dict) else None
    if document is None or not isinstance(drafts, list):
        return []
    if not drafts:
        raise RecipeError([document.problem(document.values[(_DRAFT,)], "`draft` is an empty list", "name a draft")])
    return [_with_draft(document, place) for place in range(len(drafts))]


def _with_draft(document: Document, place: int) -> Document:
    def marks(table: Mapping[Path, Mark]) -> dict[Path, Mark]:
        others = {path: mark for path, mark in table.items() if path[:1] != (_DRAFT,)}
        own = {path: mark for path, mark in table.items() if path[:2] == (_DRAFT, place)}
        return others | {(_DRAFT, *path[2:]): mark for path, mark in own.items()}

    own = replace(document, value=document.value | {_DRAFT: document.value[_DRAFT][place]})
    own.values, own.keys = marks(document.values), marks(document.keys)
    own.refused = {
        (_DRAFT, *path[2:]) if path[:2] == (_DRAFT, place) else path
        for path in document.refused
        if path[:1] != (_DRAFT,) or path[:2] in ((_DRAFT,), (_DRAFT, place))
    }
    return own


def _without_draft(document: Document | None) -> Document:
    assert document is not None, "a list stands in a recipe"

    def others(table: Mapping[Path, Mark]) -> dict[Path, Mark]:
        return {path: mark for path, mark in table.items() if path[:1] != (_DRAFT,)}

    rest = {key: value for key, value in document.value.items() if key != _DRAFT}
    return replace(document, value=rest, values=others(document.values), keys=others(document.keys))


def _value(document: Document) -> Mapping[str, Any]:
    draft = document.value[_DRAFT]
    return draft if isinstance(draft, dict) else {}


def _is_model(draft: Mapping[str, Any]) -> bool:
    return draft.get("model") is not None
