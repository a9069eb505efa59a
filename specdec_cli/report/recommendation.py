"""A sweep's recommendation in words, from the document's `recommended`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INCONCLUSIVE = "inconclusive"


RECOMMENDED, IN_USE = "recommended", "in use"


def depth_mark(k: int, recommended: Mapping[str, Any] | None, tree: str | None = None) -> str:
    """The word beside a k or a tree of that depth: `recommended`, or `in use` where the verdict is inconclusive."""
    if recommended is None or (k, tree) != (recommended["k"], recommended.get("tree")):
        return ""
    return IN_USE if recommended["verdict"] == INCONCLUSIVE else RECOMMENDED


def recommendation_words(recommended: Mapping[str, Any], at: str = "") -> str:
    """The recommendation in a sentence or, where it is inconclusive, in three."""
    if recommended["verdict"] != INCONCLUSIVE:
        return f"Recommended{at}: {recommended['why']}."
    k, tree = recommended["k"], recommended.get("tree")
    stays = f"the draft and {f'the tree {tree}' if tree else f'k = {k}'} stay" if k else "the recipe stays"
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
    if tree := recommended.get("tree"):
        return f"the tree {tree}"
    return str(recommended["k"] or "do not speculate")
