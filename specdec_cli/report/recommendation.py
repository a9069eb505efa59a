"""A sweep's recommendation in words, from the document's `recommended`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_cli.draft_shape import DraftShape

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
    k, shape = recommended["k"], DraftShape.recommended(recommended)
    stays = f"the draft and {'' if shape.tree is None else 'the '}{shape} stay" if k else "the recipe stays"
    return (
        f"Inconclusive{at}: {recommended['why']}. To settle it: {'; '.join(recommended['needs'])}. "
        f"Until then {stays} as {'they are' if k else 'it is'}."
    )


def size_name(at_size: Mapping[str, Any], has_several: bool) -> str:
    """` at batch size 8`, or nothing where there is one size."""
    return f" at batch size {at_size['batch_size']}" if has_several else ""


def short_words(recommended: Mapping[str, Any]) -> str:
    """The k or the tree alone, or the verdict."""
    if recommended["verdict"] == INCONCLUSIVE:
        return "inconclusive"
    if not recommended["k"]:
        return "do not speculate"
    shape = DraftShape.recommended(recommended)
    return f"the {shape}" if shape.tree is not None else str(shape).removeprefix("k = ")
