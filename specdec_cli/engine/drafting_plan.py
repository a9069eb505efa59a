"""How a request is drafted for and verified: what it asks for, checked against what the engine has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_cli.call_checks import check_kind
from specdec_cli.engine.drafting import NONE, Drafters
from specdec_cli.engine.options import EngineOptions
from specdec_cli.errors import UsageError
from specdec_cli.recipe.keys import check_value
from specdec_cli.recipe.schema import Speculation
from specdec_cli.tree_shape import TreeShape
from specdec_cli.verification import Rule, check_trees, resolve_mode, rule_of


@dataclass(frozen=True, slots=True)
class DraftingPlan:
    """How one request is drafted for and verified.

    Args:
        draft: name of its drafter.
        k: most tokens to draft one after another in a step.
        own_k: that the request asks for; None where the engine's holds.
        tree: shape of its drafts; None for chains.
        rule: verifies its drafts.
    """

    draft: str
    k: int
    own_k: int | None
    tree: TreeShape | None
    rule: Rule


@dataclass(frozen=True, slots=True)
class DraftingPlanner:
    """Plans the drafts of requests; any thread may ask.

    Args:
        options: of the engine.
        drafters: of the engine.
        scores_trees: whether the target can score a drafted tree.
        keeps_states: whether the target keeps a recurrent state for each node.
    """

    options: EngineOptions
    drafters: Drafters
    scores_trees: bool
    keeps_states: bool = False

    def plan(
        self,
        temperature: float,
        num_speculative_tokens: int | None = None,
        verify: str | None = None,
        tree: str | None = None,
        draft: str | None = None,
        prediction: Sequence[int] | None = None,
    ) -> DraftingPlan:
        """The plan of a request; the arguments are those of `Engine.add`.

        A static tree without a k of its own brings one: its depth.

        Raises:
            UsageError: an unknown draft or mode, a k out of range, or a tree that does not fit them.
        """
        own_k = num_speculative_tokens
        check_kind("num_speculative_tokens", own_k, int | None)
        check_value(Speculation, "num_speculative_tokens", own_k)
        name = self.drafters.name(draft, prediction)
        if tree not in (None, NONE) and own_k is None:
            own = TreeShape.parse(tree or "")
            own_k = None if own.is_dynamic else own.depth
        k = 0 if name == NONE else self.options.depths().most if own_k is None else own_k
        shape = self.shape(tree, name, k)
        if shape is not None and shape.is_chain:
            k, shape = min(k, shape.depth), None
        if shape is not None:
            self._check_states(shape.num_nodes(k), name)
        return DraftingPlan(name, k, own_k, shape, self._rule(verify, temperature, shape, name))

    def shape(self, tree: str | None, draft: str, k: int | None = None) -> TreeShape | None:
        """The shape of a request's drafts: its own, or the engine's where its drafter builds trees; None without one.

        Args:
            tree: the request's; None takes the engine's, `none` drafts chains.
            draft: name of its drafter.
            k: that its own tree has to fit; None takes the engine's.

        Raises:
            UsageError: no shape, or the target or the drafter has no trees.
        """
        if tree == NONE:
            return None
        shape = self.options.shape_of(self.options.tree) if tree is None else self.options.shape_of(tree, k)
        if shape is None or shape.is_chain:
            return shape
        if tree is None and (draft == NONE or not self.drafters.by_name[draft].builds_trees):
            return None
        if not self.scores_trees:
            raise UsageError("this model cannot score a drafted tree", "leave the tree out")
        self.drafters.check_tree(draft)
        return shape

    def _check_states(self, num_nodes: int, draft: str) -> None:
        """Refuse a request's tree with more nodes than the engine keeps recurrent states for.

        Raises:
            UsageError: it has more, and the target or the draft is a model with such states.
        """
        draft_model, most = self.drafters.by_name[draft].lm, self.options.most_nodes
        if num_nodes > most and (self.keeps_states or (draft_model is not None and draft_model.state_bytes)):
            raise UsageError(
                f"the tree has `{num_nodes}` nodes, and recurrent states are kept of `{most}`",
                "start the engine with a larger tree or k, or ask for a smaller tree",
            )

    def _rule(self, verify: str | None, temperature: float, shape: TreeShape | None, draft: str) -> Rule:
        """The rule that verifies a request's drafts.

        Raises:
            UsageError: its mode does not fit the temperature or the tree, or needs rates that the engine lacks.
        """
        draws = draft != NONE and self.drafters.by_name[draft].draws
        mode = resolve_mode(verify or self.options.verify, temperature, shape, draws)
        if shape is not None:
            check_trees(mode, temperature)
        rule = rule_of(mode, temperature)
        if rule.needs_rates and not self.options.synthetic_acceptance_rates:
            message = f"verification mode `{mode}` needs rates"
            raise UsageError(message, "give the engine synthetic_acceptance_rates")
        return rule
