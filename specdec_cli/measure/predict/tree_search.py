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
from dataclasses import dataclass, replace

import numpy as np

from specdec_cli.drafted import CONTEXT_END, MOST_NODES
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.measure.predict.tree_replay import acceptance_by_rank, replay_tree
from specdec_cli.measure.stats import FloatArray

_NUM_REPLAYED = 8
_NEVER = -np.inf


@dataclass(frozen=True, slots=True)
class TreeCosts:
    """Seconds of the parts of a step.

    Args:
        verify_seconds: the target's forward of 1, 2, … rows.
        draft_seconds: drafting a tree of depth 0, 1, …; the first is 0.
        overhead_seconds: the engine's own work in a step.
    """

    verify_seconds: Sequence[float]
    draft_seconds: Sequence[float]
    overhead_seconds: float = 0.0

    @property
    def max_nodes(self) -> int:
        """Most drafted nodes whose cost is known."""
        return min(len(self.verify_seconds) - 1, MOST_NODES)

    @property
    def max_depth(self) -> int:
        """Largest depth whose cost is known."""
        return len(self.draft_seconds) - 1

    def step(self, num_nodes: int, depth: int) -> float:
        """Seconds of a step that drafts and verifies a tree."""
        return self.draft_seconds[depth] + self.verify_seconds[num_nodes] + self.overhead_seconds


@dataclass(frozen=True, slots=True)
class PlannedTree:
    """A static tree and its expected speed.

    Args:
        parents: the node before each node, as in `Drafted`; none if plain decoding is fastest.
        depth: nodes on the longest path.
        tokens_per_step: emitted tokens per step.
        seconds_per_token: of decoding.
    """

    parents: tuple[int, ...]
    depth: int
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
    """The best tree of every size and depth, the fastest first; plain decoding is among them.

    Args:
        acceptance: by rank, as `acceptance_by_rank` measures it.
        costs: of a step.
    """
    search = TreeSearch(acceptance, costs.max_nodes, costs.max_depth)
    found: dict[tuple[int, ...], PlannedTree] = {(): PlannedTree((), 0, 1.0, costs.step(0, 0))}
    for depth in range(1, costs.max_depth + 1):
        for num_nodes in range(1, costs.max_nodes + 1):
            parents, tokens = search.best(num_nodes, depth)
            if parents not in found:  # the smallest depth at which a tree is found is its own
                seconds = costs.step(len(parents), depth) / tokens
                found[parents] = PlannedTree(parents, depth, tokens, seconds)
    return sorted(found.values(), key=lambda tree: (tree.seconds_per_token, len(tree.parents)))


def choose_tree(trace: Trace, draft: str, costs: TreeCosts) -> PlannedTree:
    """The static tree with the fewest predicted seconds per token.

    The dynamic program proposes trees, and the trace says what the most promising ones really accept.

    Args:
        trace: a target's text at temperature 0, with this draft model.
        draft: its name in the trace.
        costs: of a step.

    Raises:
        UsageError: a trace that predicts no trees.
    """
    planned = plan_trees(acceptance_by_rank(trace, draft), costs)
    plain = next(tree for tree in planned if not tree.parents)
    trees = [tree for tree in planned if tree.parents][:_NUM_REPLAYED]
    replayed = [_replayed(trace, draft, tree, costs) for tree in trees]
    return min([plain, *replayed], key=lambda tree: tree.seconds_per_token)


def _replayed(trace: Trace, draft: str, tree: PlannedTree, costs: TreeCosts) -> PlannedTree:
    """The tree with what it accepts along the trace, at the cost of steps of full depth."""
    tokens = replay_tree(trace, draft, tree.parents).tokens_per_step().median
    return replace(tree, tokens_per_step=tokens, seconds_per_token=costs.step(len(tree.parents), tree.depth) / tokens)
