"""What steps with any tree cost, from those of a few: exact where costs grow by nodes and rows as straight lines do."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_cli.draft_shape import DraftShape, shape_words
from specdec_cli.drafted import MOST_NODES
from specdec_cli.measure.predict.tree_costs import CostShares, level_rows, probe_trees
from specdec_cli.tree_shape import TreeShape

TREES = ("2", "4,2,1", "1,4", "3,2+0+1,1+0+2", "6,2+1,1+1,1", "40,2+1,3", "64")


@pytest.mark.parametrize("k_max", [1, 2, 3, 4, 8, 64])
def test_every_tree_is_priced_from_a_few(k_max: int) -> None:
    """A forward costs 5 + nodes, a pass of the draft model 2 + rows / 8."""
    probes = probe_trees(k_max)
    columns = [*map(DraftShape, range(k_max + 1)), *map(DraftShape.of, probes)]
    forward = np.array([5.0 + shape.num_nodes for shape in columns])
    # Chains are drafted in another way, which tells nothing about trees.
    draft = np.array([0.1 * one.k if one.tree is None else seconds(one.tree) for one in columns])
    for tree in [TreeShape.parse(one).cut(k_max) for one in TREES]:
        shares = CostShares.of(DraftShape.of(tree), k_max, probes)
        for depth in range(1, tree.depth + 1):
            cut = tree.cut(depth)
            assert shares.verify[depth] @ forward == pytest.approx(5 + cut.num_nodes(depth))
            assert shares.overhead[depth] @ forward == pytest.approx(5 + cut.num_nodes(depth))
            assert shares.draft[depth] @ draft == pytest.approx(seconds(cut))
        assert shares.verify[0] @ forward == 5.0
        assert shares.draft[0] @ draft == 0.0


def seconds(tree: TreeShape) -> float:
    return sum(2 + rows / 8 for rows in level_rows(tree))


@pytest.mark.parametrize("k_max", [1, 2, 3, 8])
def test_probes_reach_from_a_chain_to_the_most_nodes(k_max: int) -> None:
    probes = probe_trees(k_max)
    assert all(tree.depth == min(k_max, 3) for tree in probes)
    assert probes[0].is_chain
    assert MOST_NODES - 3 < probes[-1].num_nodes(k_max) <= MOST_NODES
    assert len(probes) <= 6


def test_a_measured_tree_has_its_own_figures() -> None:
    tree = TreeShape.parse("4,2+1")
    shares = CostShares.of(DraftShape.of(tree), 3, (*probe_trees(3), tree))
    for part in (shares.draft, shares.verify, shares.overhead):
        assert part[2].tolist() == [0.0] * 9 + [1.0]


def test_passes_read_the_nodes_that_get_children() -> None:
    assert level_rows(TreeShape.parse("3,2+0+1,1+0+2")) == [1, 2, 2]
    assert level_rows(TreeShape.parse("4,2,1")) == [1, 4, 8]


def test_shapes_in_words() -> None:
    trees = [DraftShape.of(TreeShape.parse(one)) for one in ("3,1", "4,2")]
    assert shape_words([DraftShape(4), DraftShape(5)]) == "k = 4, 5"
    assert shape_words([DraftShape(4), *trees]) == "k = 4, tree 3,1 and tree 4,2"
    assert shape_words(trees[:1]) == "tree 3,1"
    assert sorted([trees[1], DraftShape(9), trees[0], DraftShape(1)]) == [DraftShape(1), DraftShape(9), *trees]
