"""How many tokens in a row a draft can give, whatever k or tree is wanted of it: a block or a set of heads ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec_cli import drafters
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.drafters.contract import Drafter
    from specdec_cli.engine.engine import Engine
    from specdec_cli.tree_shape import TreeShape


def cut_drafts(drafter: Drafter, k: int, tree: TreeShape | None = None) -> list[str]:
    """That a draft, or one of two, is wanted deeper than it can go; nothing where none is.

    Args:
        drafter: loaded.
        k: most tokens wanted one after another.
        tree: the shape that is wanted; None for chains.
    """
    wanted, words = k, f"and k is {k}"
    if tree is not None and tree.depth <= k and not tree.is_dynamic:
        wanted, words = tree.depth, f"and the tree `{tree}` is {tree.depth} deep"
    limits = {drafters.method_of(part): part.most_depth for part in drafters.parts(drafter)}
    return [
        f"{_says(name, most)}, {words}: its drafts are cut to {most}"
        for name, most in limits.items()
        if most is not None and most < wanted
    ]


def own_cut_drafts(engine: Engine) -> list[str]:
    """The same of an engine's own draft, k and tree."""
    shape = engine.planner.shape(engine.options.tree, engine.drafters.own_name)
    return cut_drafts(engine.drafter, engine.options.depths().most, shape)


def depths_within(drafter: Drafter, k_max: int) -> tuple[int, list[str]]:
    """The largest k up to k_max that differs from the one before it, and sentences where the draft sets a limit.

    Of two drafts, one with a limit lets the other go deeper: then all k differ.
    """
    most = drafter.most_depth
    if most is None or most >= k_max:
        return k_max, cut_drafts(drafter, k_max)
    return most, [f"k ends at {most}, not at {k_max}, because {_says(drafters.method_of(drafter), most)}"]


def check_reach(drafter: Drafter, k: int) -> None:
    """Refuse a k that a draft does not reach.

    Raises:
        UsageError: it does not.
    """
    most = drafter.most_depth
    if most is not None and most < k:
        message = f"{_says(drafters.method_of(drafter), most)}, and k is `{k}`"
        raise UsageError(message, f"choose a k up to {most}")


def check_depth(drafter: Drafter, tree: TreeShape) -> None:
    """Refuse a static tree that is deeper than a draft goes.

    Raises:
        UsageError: it is.
    """
    most = drafter.most_depth
    if most is not None and most < tree.depth and not tree.is_dynamic:
        message = f"{_says(drafters.method_of(drafter), most)}, and the tree `{tree}` is `{tree.depth}` deep"
        raise UsageError(message, f"shorten the tree to `{tree.cut(most)}`")


def _says(name: str, most: int) -> str:
    return f"the draft `{name}` drafts at most {most} token{'s' if most > 1 else ''} in a row"
