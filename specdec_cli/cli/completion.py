"""Shell completion of recipes, models, drafts and data sets. Nothing here imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

Completion = Callable[[str], list[tuple[str, str]]]
"""Values that begin with what was typed, each with a few words about it."""


def recipes(incomplete: str) -> list[tuple[str, str]]:
    """Shipped recipes."""
    from specdec_cli.recipe import shipped

    return _matching(incomplete, [(recipe.name, recipe.title) for recipe in shipped.list_recipes()])


def targets(incomplete: str) -> list[tuple[str, str]]:
    """The built-in target and models in the hub's cache."""
    from specdec_cli.recipe.schema import DEFAULT_TARGET

    return _matching(incomplete, [(DEFAULT_TARGET, "the built-in target"), *_cached("models")])


def drafts(incomplete: str) -> list[tuple[str, str]]:
    """The built-in draft, methods, and models in the hub's cache."""
    from specdec_cli import drafters
    from specdec_cli.recipe.schema import DEFAULT_DRAFT

    methods = [(name, "drafting method") for name in drafters.without_model() if name != "none"]
    known = [(DEFAULT_DRAFT, "the built-in draft"), *methods, ("none", "no draft"), *_cached("models")]
    return _matching(incomplete, known)


def datasets(incomplete: str) -> list[tuple[str, str]]:
    """The built-in data sets, presets, and data sets in the hub's cache."""
    from specdec_cli.measure.workload.dataset import BUILT_IN, PRESETS

    built_in = [(name, "built-in") for name in BUILT_IN]
    return _matching(incomplete, [*built_in, *((name, "preset") for name in PRESETS), *_cached("datasets")])


def choices(value_name: str) -> Completion:
    """The values of an option whose value name lists them: `auto|float32`."""
    known = [(name, "") for name in value_name.split("|") if name.islower()]

    def complete(incomplete: str) -> list[tuple[str, str]]:
        return _matching(incomplete, known)

    return complete


def _matching(incomplete: str, known: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [value for value in known if value[0].startswith(incomplete)]


def _cached(kind: str) -> list[tuple[str, str]]:
    """Models or data sets that the hub's cache holds."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    folder = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    names = sorted(path.name.removeprefix(f"{kind}--") for path in folder.glob(f"{kind}--*"))
    return [(name.replace("--", "/"), "in the cache") for name in names]


COMPLETIONS: dict[str, Completion] = {
    "recipe": recipes,
    "target.model": targets,
    "draft": drafts,
    "workload.dataset": datasets,
}
"""By the option's path."""
