"""Keys that imply others: random weights for a shape and its draft, the mode for synthetic rates."""

from __future__ import annotations

from specdec_cli.errors import UsageError
from specdec_cli.recipe.layers import Tree
from specdec_cli.recipe.problems import Path, Problem
from specdec_cli.recipe.schema import Recipe
from specdec_cli.tree_shape import TreeShape
from specdec_cli.verification import AUTO, RULES

SHAPE = "shape:"
"""Begins the name of a model that is a shape alone, such as `shape:llama-2-70b`."""
SYNTHETIC = "synthetic"
_LENGTH, _RATES = ("speculation", "synthetic_acceptance_length"), ("speculation", "synthetic_acceptance_rates")
_TREE = ("speculation", "tree")
_VERIFY, _K = ("speculation", "verify"), ("speculation", "num_speculative_tokens")


def fill_implied(tree: Tree) -> None:
    """Complete the tree: a shape has random weights, a draft those of its target, and given rates their own mode."""
    for section in ("target", "draft"):
        model = _given(tree, (section, "model"))
        if not isinstance(model, str) or _given(tree, (section, "load_format")) is not None:
            continue
        of_target = section == "draft" and _given(tree, ("target", "load_format")) == "dummy"
        if model.startswith(SHAPE) or of_target:
            why = (section, "model") if model.startswith(SHAPE) else ("target", "load_format")
            _imply(tree, (section, "load_format"), "dummy", why)
    shape = _shape(_given(tree, _TREE))
    if shape is not None and not shape.is_dynamic and not tree.layer(_K):
        _imply(tree, _K, shape.depth, _TREE)
    for path in (_LENGTH, _RATES):
        if _given(tree, path) is not None and _given(tree, _VERIFY) in (None, "auto"):
            _imply(tree, _VERIFY, SYNTHETIC, path)


def _shape(value: object) -> TreeShape | None:
    """The tree that a recipe names; None where it names none, or no shape, which its check refuses."""
    try:
        return None if value is None else TreeShape.parse(str(value))
    except UsageError:
        return None


def _given(tree: Tree, path: Path) -> object:
    section = tree.values.get(path[0])
    return section.get(path[1]) if isinstance(section, dict) else None


def _imply(tree: Tree, path: Path, value: str | int, why: Path) -> None:
    tree.values[path[0]][path[1]] = value
    origin = tree.origin(why)
    if origin is not None:
        tree.origins[path] = origin


def implied_problems(recipe: Recipe, tree: Tree) -> list[Problem]:
    """Keys that contradict what others imply."""
    return [*_weights_of_a_shape(recipe, tree), *_synthetic_acceptance(recipe, tree), *_tree_problems(recipe, tree)]


def _tree_problems(recipe: Recipe, tree: Tree) -> list[Problem]:
    """A static tree is not cut, none is drafted without a draft; some policies and rules have no tree."""
    speculation = recipe.speculation
    shape, k = _shape(speculation.tree), speculation.num_speculative_tokens
    if shape is None:
        return []
    if k == 0:
        message = f"needs drafted tokens, and {tree.subject(_K)} is `0`"
        return [tree.problem(_TREE, message, "leave one of them out (`--set speculation.tree=null` in a recipe)")]
    if not shape.is_dynamic and k < shape.depth:
        message = f"`{shape}` is `{shape.depth}` deep, and {tree.subject(_K)} is `{k}`"
        return [tree.problem(_TREE, message, f"set num_speculative_tokens to {shape.depth} (-k), or shorten the tree")]
    if speculation.depth_policy in ("adaptive", "heuristic"):
        message = f"does not fit depth_policy `{speculation.depth_policy}`, which changes a chain's length"
        return [tree.problem(_TREE, message, "use depth_policy fixed or confidence, or leave the tree out")]
    if not shape.is_chain and speculation.verify != AUTO and not RULES[speculation.verify].judges_trees:
        message = f"is `{shape}`, and verification mode `{speculation.verify}` judges chains alone"
        return [tree.problem(_TREE, message, "use --verify auto, or leave --tree out")]
    return []


def _weights_of_a_shape(recipe: Recipe, tree: Tree) -> list[Problem]:
    problems = []
    for section, model in (("target", recipe.target), ("draft", recipe.draft)):
        if (model.model or "").startswith(SHAPE) and model.load_format != "dummy":
            hint = "leave load_format out, or name a model that has weights"
            message = f"`{model.load_format}` does not fit `{model.model}`, a shape without weights"
            problems.append(tree.problem((section, "load_format"), message, hint))
    return problems


def _synthetic_acceptance(recipe: Recipe, tree: Tree) -> list[Problem]:
    """Rates are given in one way, together with their own mode, and can be had with this k."""
    speculation = recipe.speculation
    length, rates, k = (
        speculation.synthetic_acceptance_length,
        speculation.synthetic_acceptance_rates,
        speculation.num_speculative_tokens,
    )
    if length is None and rates is None:
        hint = "give --synthetic-acceptance-length or --synthetic-acceptance-rates"
        missing = tree.problem(_VERIFY, f"`{SYNTHETIC}` needs an acceptance length or rates", hint)
        return [missing] if speculation.verify == SYNTHETIC else []
    if length is not None and rates is not None:
        return [tree.problem(_RATES, f"cannot go with {tree.subject(_LENGTH)}", "give one of them")]
    path = _LENGTH if rates is None else _RATES
    if speculation.verify != SYNTHETIC:
        message = f"replaces verification, and verify is `{speculation.verify}`"
        return [tree.problem(path, message, "leave one of them out")]
    if length is not None and length > k + 1:
        message = f"`{length:g}` is more than k + 1 = {k + 1}, the maximum number of tokens per step"
        return [tree.problem(path, message, "lower it, or raise num_speculative_tokens (-k)")]
    if rates is not None and len(rates) != k:
        message = f"has {len(rates)} rates, and {tree.subject(_K)} is `{k}`: each drafted token has one"
        return [tree.problem(path, message, f"give {k} rates, or set num_speculative_tokens to {len(rates)}")]
    return []
