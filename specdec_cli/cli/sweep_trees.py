"""The trees that `sweep-k` considers beside the chains: which are wanted, and which can be predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli.measurement_options import HOW
from specdec_cli.errors import UsageError
from specdec_cli.tree_shape import AUTO, TreeShape
from specdec_cli.verification import RULES

if TYPE_CHECKING:
    from specdec_cli.recipe import Recipe
    from specdec_cli.recipe.schema import Speculation

_MEASURE = "measure the tree with specdec bench --tree, or leave the tree out"

Trees = Annotated[
    list[str] | None,
    typer.Option(
        "--tree",
        help="Consider a tree beside the chains: auto for the best trees, or a shape such as 4,2,1. Repeat for more.",
        metavar="auto|4,2,1",
        rich_help_panel=HOW,
    ),
]


def wanted_trees(named: Sequence[str], speculation: Speculation, k_max: int) -> tuple[str, ...]:
    """The trees to consider: those of --tree and the recipe's own, each once, AUTO first.

    Raises:
        UsageError: no static tree with siblings, or one deeper than k_max.
    """
    own = [] if speculation.tree is None else [speculation.tree]
    wanted = [tree.strip() for tree in (*named, *own)]
    shapes = [TreeShape.parse(tree) for tree in wanted if tree != AUTO]
    for shape in shapes:
        _check_shape(shape, k_max)
    return tuple(dict.fromkeys([AUTO] * (AUTO in wanted) + [str(shape) for shape in shapes]))


def _check_shape(shape: TreeShape, k_max: int) -> None:
    if shape.is_dynamic:
        message = f"the nodes of the tree `{shape}` depend on the draft's probabilities, which a trace does not hold"
        raise UsageError(message, f"measure it with specdec bench --tree {shape}, or name a static tree")
    if shape.is_chain:
        raise UsageError(f"the tree `{shape}` is the chain k = {shape.depth}", "leave it out: every k is considered")
    if shape.depth > k_max:
        hint = f"set --k-max {shape.depth}, or shorten the tree"
        raise UsageError(f"the tree `{shape}` is `{shape.depth}` deep, and --k-max is `{k_max}`", hint)


def check_trees(recipe: Recipe, batch_sizes: Sequence[int]) -> None:
    """Refuse trees that cannot be predicted, before anything is loaded.

    Raises:
        UsageError: sampling, a draft without ranks, a rule that judges chains alone, or several batch sizes.
    """
    from specdec_cli import drafters
    from specdec_cli.measure.predict.starts import check_knowable

    speculation, temperature = recipe.speculation, recipe.sampling.temperature
    method: Any = drafters.get(recipe.draft.method or "model")
    check_ranks(recipe, has_ranks=method.draws is True and recipe.draft.first is None)
    if temperature > 0:
        hint = f"set --temperature 0, or {_MEASURE}"
        raise UsageError(f"trees are predicted at temperature 0, not at `{temperature:g}`", hint)
    check_knowable(speculation.verify, speculation.least_confidence)
    rule = RULES.get(speculation.verify)
    if rule is not None and not rule.judges_trees:
        message = f"verification mode `{speculation.verify}` judges chains alone, not trees"
        raise UsageError(message, "use --verify auto")
    if len(batch_sizes) > 1:
        message = f"a recipe has one tree for all batch sizes, and --batch-sizes names {len(batch_sizes)}"
        raise UsageError(message, "sweep one batch size at a time, or leave the tree out")


def check_ranks(recipe: Recipe, *, has_ranks: bool) -> None:
    """Refuse a draft in whose distribution tokens have no rank.

    Raises:
        UsageError: it is one.
    """
    if not has_ranks:
        name = recipe.draft.method or recipe.draft.model
        message = f"the draft `{name}` has no ranks of tokens, so a trace cannot predict its trees"
        raise UsageError(message, _MEASURE)
