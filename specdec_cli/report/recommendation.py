"""A sweep's recommendation in words, from the document's `recommended`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INCONCLUSIVE = "inconclusive"


RECOMMENDED, IN_USE = "recommended", "in use"


def depth_mark(
    k: int, recommended: Mapping[str, Any] | None, tree: str | None = None, p_min: float | None = None
) -> str:
    """The word beside a shape of a depth: `recommended`, or `in use` where the verdict is inconclusive."""
    if recommended is None or (k, tree, p_min) != (recommended["k"], *map(recommended.get, ("tree", "p_min"))):
        return ""
    return IN_USE if recommended["verdict"] == INCONCLUSIVE else RECOMMENDED


def recommendation_words(recommended: Mapping[str, Any], at: str = "") -> str:
    """The recommendation in a sentence or, where it is inconclusive, in three."""
    if recommended["verdict"] != INCONCLUSIVE:
        return f"Recommended{at}: {recommended['why']}."
    k, shape = recommended["k"], shape_words(recommended)
    stays = f"the draft and {shape} stay" if k else "the recipe stays"
    return (
        f"Inconclusive{at}: {recommended['why']}. To settle it: {'; '.join(recommended['needs'])}. "
        f"Until then {stays} as {'they are' if k else 'it is'}."
    )


def shape_words(recommended: Mapping[str, Any]) -> str:
    """`k = 4`, `k = 4 with p-min 0.6` or `the tree 4,2,1`."""
    if tree := recommended.get("tree"):
        return f"the tree {tree}"
    p_min = recommended.get("p_min")
    return f"k = {recommended['k']}{f' with p-min {p_min:g}' if p_min else ''}"


def size_name(at_size: Mapping[str, Any], has_several: bool) -> str:
    """` at batch size 8`, or nothing where there is one size."""
    return f" at batch size {at_size['batch_size']}" if has_several else ""


def short_words(recommended: Mapping[str, Any]) -> str:
    """The k or the tree alone, or the verdict."""
    if recommended["verdict"] == INCONCLUSIVE:
        return "inconclusive"
    if not recommended["k"]:
        return "do not speculate"
    return shape_words(recommended).removeprefix("k = ")
