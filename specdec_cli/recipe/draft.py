"""The draft's keys: which go together, and which a drafting method has. The rooms above say what methods there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_cli.errors import UsageError, did_you_mean
from specdec_cli.recipe.aliases import meant_key
from specdec_cli.recipe.layers import Tree, problem_at
from specdec_cli.recipe.problems import Problem
from specdec_cli.recipe.schema import DEFAULT_DRAFT, DEFAULT_DRAFT_QUANTIZE, DEFAULT_PAIR_K, MODEL_KEYS, Draft


@dataclass(frozen=True, slots=True)
class DraftMethods:
    """The drafting methods that a recipe may name. Rooms above this one provide them.

    Args:
        names: every method.
        options: a method's options with their defaults (a default of `...` must be given).
        check: refuses wrong options of a method with a UsageError.
        check_first: refuses what cannot be a draft's `first` with a UsageError.
    """

    names: Sequence[str]
    options: Callable[[str], Mapping[str, Any]]
    check: Callable[[str, Mapping[str, Any]], object]
    check_first: Callable[[str], object]


def fill_draft(tree: Tree, built_in: bool, methods: DraftMethods | None) -> None:
    """Complete the draft: none where only a target is named; where nothing is named, what the recipe `builtin` has."""
    draft = tree.values.get("draft", {})
    if isinstance(draft, dict) and not {"model", "method"} & {key for key in draft if draft[key] is not None}:
        if built_in:
            draft["model"] = DEFAULT_DRAFT
            draft.setdefault("quantize", DEFAULT_DRAFT_QUANTIZE)
            _fill_depth(tree)
        elif not draft:
            draft["method"] = "none"
    method = draft.get("method") if isinstance(draft, dict) else None
    if methods is not None and isinstance(method, str) and method in methods.names:
        for option, default in methods.options(method).items():
            if default is not ...:
                draft.setdefault(option, default)
    tree.values["draft"] = draft


def _fill_depth(tree: Tree) -> None:
    """The built-in pair's own k if none is given. Synthetic acceptance keeps the general default."""
    speculation = tree.values.setdefault("speculation", {})
    if isinstance(speculation, dict) and not any(str(key).startswith("synthetic_") for key in speculation):
        speculation.setdefault("num_speculative_tokens", DEFAULT_PAIR_K)


def draft_problems(draft: Draft, tree: Tree, methods: DraftMethods | None) -> list[Problem]:
    """Whether the draft's keys go together and are the method's."""
    if draft.model is None and draft.method is None:
        hint = "for example `model: Qwen/Qwen3-0.6B` or `method: ngram`"
        return [tree.problem(("draft", *draft.model_fields_set)[:2], "needs a `model` or a `method` beside it", hint)]
    options = _options_of(draft, tree, methods)
    if isinstance(options, Problem):
        return [options]
    loads = draft.method is None or "model" in options
    known = [*(MODEL_KEYS if loads else ()), *options, "model", "method", "first"]
    if draft.model is not None and not loads and methods is not None:
        message = f"cannot go with a draft model, here `{draft.model}`"
        return [tree.problem(("draft", "method"), message, "give one of them")]
    strange = [key for key in draft.model_fields_set | set(draft.options) if key not in known]
    if methods is None and draft.method is not None:
        strange = [key for key in strange if key in MODEL_KEYS]
    if strange:
        return [_strange_key(key, draft, tree, known) for key in sorted(strange)]
    return _refused_options(draft, options, tree, methods)


def _options_of(draft: Draft, tree: Tree, methods: DraftMethods | None) -> Mapping[str, Any] | Problem:
    if draft.method is None or methods is None:
        return {}
    try:
        return methods.options(draft.method)
    except UsageError as error:
        message = f"{error.message}{did_you_mean(draft.method, methods.names)}"
        origin = tree.origin(("draft", "method"))
        hint = f"methods: {', '.join(methods.names)}"
        return problem_at(origin, message, hint)


def _strange_key(key: str, draft: Draft, tree: Tree, known: Sequence[str]) -> Problem:
    origin = tree.key_origin(("draft", key))
    whose = f"draft method `{draft.method}`" if draft.method else "a draft model"
    if key in MODEL_KEYS:
        message = f"{tree.subject(('draft', key))} has no meaning for {whose}, which loads no model"
    else:
        message = f"unknown key `{key}` for {whose}{meant_key('draft', key, known)}"
    return problem_at(origin, message)


def _refused_options(
    draft: Draft, options: Mapping[str, Any], tree: Tree, methods: DraftMethods | None
) -> list[Problem]:
    if methods is None:
        return []
    try:
        if draft.first is not None:
            methods.check_first(draft.first)
    except UsageError as error:
        return [problem_at(tree.origin(("draft", "first")), error.message, error.hint)]
    if draft.method is None:
        return []
    draft_options = draft.options | ({"model": draft.model} if draft.model is not None else {})
    try:
        methods.check(draft.method, {key: value for key, value in draft_options.items() if key in options})
    except UsageError as error:
        named = [key for key in draft_options if f"`{key}`" in error.message]
        return [problem_at(tree.origin(("draft", named[0] if named else "method")), error.message, error.hint)]
    return []
