"""Which static tree to draft: Sequoia's dynamic program over measured acceptance, and the cost of a step.

Sequoia (Chen et al. 2024, arXiv 2402.12374) takes p_b, the probability that the target chooses the b-th child, to be
the same at every node. With T(m, l, b) the expected tokens per step of the best tree of m nodes (the context's end is
one of them), at most l deep, with b children at the context's end:

    T(1, l, 0) = 1
    T(m, l, b) = max over 1 ≤ y < m of T(y, l, b - 1) + p_b · max_b' T(m - y, l - 1, b')

The measured p is an average over all positions, so replay has the last word on the most promising trees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec_cli.drafted import CONTEXT_END
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.measure.predict.tree_costs import TreeCosts
from specdec_cli.measure.predict.tree_replay import acceptance_by_rank, replay_tree
from specdec_cli.measure.stats import FloatArray
from specdec_cli.tree_shape import TreeShape

_NUM_REPLAYED = 4  # of each depth
_NEVER = -np.inf


@dataclass(frozen=True, slots=True)
class PlannedTree:
    """A static tree and its expected speed.

    Args:
        tree: None if plain decoding is meant.
        tokens_per_step: emitted tokens per step.
        seconds_per_token: of decoding.
    """

    tree: TreeShape | None
    tokens_per_step: float
    seconds_per_token: float


class TreeSearch:
    """The dynamic program, solved for every number of nodes and every depth.

    Args:
        acceptance: p_1, p_2, …, by rank among siblings.
        max_nodes: most drafted nodes.
        max_depth: most nodes on a path.
    """

    def __init__(self, acceptance: Sequence[float] | FloatArray, max_nodes: int, max_depth: int) -> None:
        rates = np.trim_zeros(np.asarray(acceptance, dtype=np.float64), "b")[:max_nodes]
        num, width = max_nodes + 2, len(rates) + 1
        # [l, b, m]: T, and the y that gave it; m counts the context's end, and column 0 stays impossible.
        self._values = np.full((max_depth + 1, width, num), _NEVER)
        self._splits = np.zeros((max_depth + 1, width, num), dtype=np.int64)
        self._values[:, 0, 1] = 1.0
        rest = np.maximum(np.arange(num)[:, None] - np.arange(num), 0)
        for depth in range(1, max_depth + 1):
            below = self._values[depth - 1].max(axis=0)
            for b, rate in enumerate(rates, 1):
                gain = np.where(np.isfinite(below), rate * np.maximum(below, 0.0), _NEVER)
                both = self._values[depth, b - 1][None, :] + gain[rest]
                self._splits[depth, b] = both.argmax(axis=1)
                self._values[depth, b] = both.max(axis=1)

    def best(self, num_nodes: int, depth: int) -> tuple[tuple[int, ...], float]:
        """The tree with the most expected tokens per step.

        Args:
            num_nodes: most drafted nodes.
            depth: most nodes on a path.

        Returns:
            Parents of the nodes, depth by depth with the likeliest sibling first, and the tokens per step. Of equally
            good trees it is the smallest.
        """
        values = self._values[depth].max(axis=0)[: num_nodes + 2]
        size = int(values.argmax())
        return self._parents(size, depth), float(values[size])

    def _parents(self, size: int, depth: int) -> tuple[int, ...]:
        """Parents of the best tree of exactly so many nodes, the context's end included."""
        parents: list[int] = []
        waiting = deque([(CONTEXT_END, size, depth)])
        while waiting:
            node, left, below = waiting.popleft()
            sizes = []
            for b in range(int(self._values[below, :, left].argmax()), 0, -1):
                before = int(self._splits[below, b, left])
                sizes.append(left - before)
                left = before
            for child_size in reversed(sizes):
                waiting.append((len(parents), child_size, below - 1))
                parents.append(node)
        return tuple(parents)


def plan_trees(acceptance: Sequence[float] | FloatArray, costs: TreeCosts) -> list[PlannedTree]:
    """The best tree of every size and depth, the fastest first; plain decoding is among them."""
    search = TreeSearch(acceptance, costs.max_nodes, costs.max_depth)
    best_by_parents: dict[tuple[int, ...], PlannedTree] = {(): PlannedTree(None, 1.0, costs.step(None))}
    for depth in range(1, costs.max_depth + 1):
        for num_nodes in range(1, costs.max_nodes + 1):
            parents, tokens = search.best(num_nodes, depth)
            if parents not in best_by_parents:
                tree = TreeShape.of(parents)
                best_by_parents[parents] = PlannedTree(tree, tokens, costs.step(tree) / tokens)
    planned = best_by_parents.values()
    return sorted(planned, key=lambda plan: (plan.seconds_per_token, 0 if plan.tree is None else plan.tree.depth))


def choose_trees(trace: Trace, draft: str, costs: TreeCosts, num: int) -> list[PlannedTree]:
    """The static trees with siblings that have the fewest predicted seconds per token, each of another depth.

    The dynamic program proposes trees, and the trace says what the most promising ones of each depth really accept.

    Args:
        trace: a target's text at temperature 0, with this draft model.
        draft: its name in the trace.
        costs: of a step.
        num: how many trees are wanted.

    Returns:
        The fastest first; fewer where the program finds no more. A chain may be faster than all of them.

    Raises:
        UsageError: a trace that predicts no trees.
    """
    by_depth: dict[int, list[TreeShape]] = {}
    for plan in plan_trees(acceptance_by_rank(trace, draft), costs):
        if plan.tree is not None and not plan.tree.is_chain:
            by_depth.setdefault(plan.tree.depth, []).append(plan.tree)
    best = []
    for trees in by_depth.values():
        replayed = [_replayed(trace, draft, tree, costs) for tree in trees[:_NUM_REPLAYED]]
        best.append(min(replayed, key=lambda plan: plan.seconds_per_token))
    return sorted(best, key=lambda plan: plan.seconds_per_token)[:num]


def _replayed(trace: Trace, draft: str, tree: TreeShape, costs: TreeCosts) -> PlannedTree:
    """The tree with what it accepts along the trace, at the cost of steps of full depth."""
    tokens = replay_tree(trace, draft, tree.parents).tokens_per_step().median
    return PlannedTree(tree, tokens, costs.step(tree) / tokens)
