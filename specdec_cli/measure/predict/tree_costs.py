"""The cost of steps with any static tree, from the measured costs of a few trees.

A step with a tree verifies one row per node and one more. Its draft model makes one forward pass per depth, over the
nodes of that depth that get children (the context's end, for the first). So a cost profile measures a few trees whose
depths below the first all have the same number of nodes r, and each figure of another tree is a weighted sum of
measured ones: verification and the engine's own work by nodes, a pass of the draft by rows, between the measured
numbers by a straight line. A tree that was itself measured has its own figures.

Letters: W columns of `Costs`: k_max + 1 chains, then the measured trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specdec_cli.draft_shape import DraftShape
from specdec_cli.drafted import MOST_NODES
from specdec_cli.measure.stats import FloatArray
from specdec_cli.tree_shape import TreeShape

if TYPE_CHECKING:
    from specdec_cli.measure.predict.cost import Costs

_ROWS = (1, 2, 5, 10, 21)
_DEPTH = 3


def probe_trees(k_max: int) -> tuple[TreeShape, ...]:
    """The trees to measure, from which the costs of every tree that is at most k_max deep follow."""
    depth = min(_DEPTH, k_max)
    widest = MOST_NODES // depth
    rows = sorted({*(num for num in _ROWS if num < widest), widest})
    return tuple(TreeShape(((row,), *[(1,) * row] * (depth - 1))) for row in rows)


@dataclass(frozen=True, slots=True, eq=False)
class CostShares:
    """The weights of measured figures in those of a draft's shape, by the depth that a step asks for.

    Steps near the end of a text ask for less than the whole depth.

    Args:
        draft: [k+1, W] of drafting 0…k deep,
        verify: [k+1, W] of the target's forward,
        overhead: [k+1, W] of the engine's own work.
    """

    draft: FloatArray
    verify: FloatArray
    overhead: FloatArray

    @classmethod
    def of(cls, shape: DraftShape, k_max: int, measured: Sequence[TreeShape]) -> CostShares:
        """Shares of a shape's costs; every chain up to k_max was measured, and of trees a few."""
        own = np.eye(k_max + 1, k_max + 1 + len(measured))
        if shape.tree is None:
            return cls(*[own[: shape.k + 1]] * 3)
        rows = [_of_tree(shape.tree.cut(depth), k_max, measured) for depth in range(1, shape.k + 1)]
        return cls(*(np.stack(parts) for parts in zip([own[0]] * 3, *rows, strict=True)))


@dataclass(frozen=True, slots=True)
class TreeCosts:
    """Seconds of the parts of a step at one context.

    Args:
        node_seconds: the target's forward and the engine's own work with 0, 1, … drafted nodes.
        pass_seconds: a pass of the draft model over 0, 1, … rows; the first is 0.
        max_depth: of a tree.
    """

    node_seconds: Sequence[float]
    pass_seconds: Sequence[float]
    max_depth: int

    @classmethod
    def of(cls, costs: Costs, context: float) -> TreeCosts:
        """Costs of trees from a profile that measured `probe_trees`."""
        at = costs.context_shares(np.array([context]))[0]
        forward, draft = at @ costs.target_seconds + costs.overhead_seconds, at @ costs.draft_seconds
        nodes = [node_shares(num, costs.k_max, costs.trees) @ forward for num in range(MOST_NODES + 1)]
        passes = [level_shares(num, costs.k_max, costs.trees) @ draft for num in range(1, MOST_NODES + 1)]
        pass_seconds = [0.0, *(max(float(seconds), 0.0) for seconds in passes)]
        return cls([float(node) for node in nodes], pass_seconds, costs.k_max)

    @property
    def max_nodes(self) -> int:
        """Most drafted nodes whose cost is known."""
        return min(len(self.node_seconds) - 1, len(self.pass_seconds) - 1, MOST_NODES)

    def step(self, tree: TreeShape | None) -> float:
        """Seconds of a step that drafts and verifies a static tree; of plain decoding without one."""
        if tree is None:
            return self.node_seconds[0]
        passes = sum(self.pass_seconds[num] for num in level_rows(tree))
        return passes + self.node_seconds[tree.num_nodes(tree.depth)]


def level_rows(tree: TreeShape) -> list[int]:
    """Rows of the draft model's pass for each depth of a tree: the nodes above it that get children."""
    return [sum(count > 0 for count in level) for level in tree.levels]


def level_shares(num_rows: int, k_max: int, measured: Sequence[TreeShape]) -> FloatArray:
    """Weights [W] of measured drafts in one pass of the draft model over so many rows."""
    probes = probe_trees(k_max)
    columns = [_column(tree, k_max, measured) for tree in probes]
    first = columns[0] / probes[0].depth  # one row at each depth
    below = probes[0].depth - 1
    if not below:
        return first
    passes = [first, *((column - first) / below for column in columns[1:])]
    weights = _between(num_rows, [level_rows(tree)[-1] for tree in probes])
    return np.asarray(weights @ np.array(passes))


def node_shares(num_nodes: int, k_max: int, measured: Sequence[TreeShape]) -> FloatArray:
    """Weights [W] of measured forwards, or of the engine's own work, in those of a tree with so many nodes."""
    probes = probe_trees(k_max)
    plain = np.eye(1, k_max + 1 + len(measured))[0]
    columns = [plain, *(_column(tree, k_max, measured) for tree in probes)]
    weights = _between(num_nodes, [0, *(tree.num_nodes(tree.depth) for tree in probes)])
    return np.asarray(weights @ np.array(columns))


def _of_tree(tree: TreeShape, k_max: int, measured: Sequence[TreeShape]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Weights of drafting, verification and the engine's own work."""
    if tree in measured:
        own = _column(tree, k_max, measured)
        return own, own, own
    draft = np.sum([level_shares(num, k_max, measured) for num in level_rows(tree)], axis=0)
    nodes = node_shares(tree.num_nodes(tree.depth), k_max, measured)
    return draft, nodes, nodes


def _column(tree: TreeShape, k_max: int, measured: Sequence[TreeShape]) -> FloatArray:
    """The weights that take a measured tree's own figure."""
    column = np.zeros(k_max + 1 + len(measured))
    column[k_max + 1 + list(measured).index(tree)] = 1.0
    return column


def _between(value: int, points: Sequence[int]) -> FloatArray:
    """Weights of the two points around a value; beyond the last, the line through the last two goes on."""
    weights = np.zeros(len(points))
    if len(points) == 1:
        return weights + 1
    upper = int(np.clip(np.searchsorted(points, value), 1, len(points) - 1))
    low, high = points[upper - 1], points[upper]
    weights[upper] = (value - low) / (high - low)
    weights[upper - 1] = 1 - weights[upper]
    return weights
