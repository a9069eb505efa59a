"""Sequoia's dynamic programme against every tree there is, and the choice by cost."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from test_tree_replay import traced
from typed import not_none

from specdec_cli.drafted import Drafted
from specdec_cli.measure.predict.tree_costs import TreeCosts
from specdec_cli.measure.predict.tree_replay import acceptance_by_rank, replay_tree
from specdec_cli.measure.predict.tree_search import TreeSearch, choose_trees, plan_trees
from specdec_cli.tree_shape import TreeShape

RATES = ([0.6, 0.2, 0.1], [0.3, 0.0, 0.4, 0.05], [0.9], [0.0, 0.5], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0])


def trees(num_nodes):
    """Every tree of exactly so many nodes, as parents; siblings in order."""
    return list(product(*(range(-1, node) for node in range(num_nodes))))


def expected_tokens(parents, rates):
    """1 + the sum of every node's probability to be accepted."""
    drafted = Drafted(tuple(range(len(parents))), parents)
    chances = []
    for node, parent in enumerate(parents):
        rank = drafted.children(parent).index(node)
        rate = rates[rank] if rank < len(rates) else 0.0
        chances.append(rate * (chances[parent] if parent >= 0 else 1.0))
    return 1 + sum(chances)


def depth_of(parents):
    return Drafted(tuple(range(len(parents))), parents).max_depth


@pytest.mark.parametrize("rates", RATES)
def test_no_tree_is_better(rates) -> None:
    search = TreeSearch(rates, 6, 5)
    values = [(n, depth_of(tree), expected_tokens(tree, rates)) for n in range(1, 7) for tree in trees(n)]
    for num_nodes, depth in product(range(7), range(6)):
        within = [value for n, deep, value in values if n <= num_nodes and deep <= depth]
        parents, tokens = search.best(num_nodes, depth)
        assert tokens == pytest.approx(max(within, default=1.0))
        assert expected_tokens(parents, rates) == pytest.approx(tokens)
        assert len(parents) <= num_nodes
        assert not parents or depth_of(parents) <= depth


def test_large_trees_take_the_likeliest_nodes() -> None:
    """With descending rates the best tree of m nodes has the m likeliest ones."""
    rates = [0.5, 0.2, 0.12, 0.05, 0.02]
    chances = sorted((np.prod(path) for d in range(1, 8) for path in product(rates, repeat=d)), reverse=True)
    search = TreeSearch(rates, 64, 7)
    for num_nodes in (1, 16, 40, 64):
        parents, tokens = search.best(num_nodes, 7)
        assert tokens == pytest.approx(1 + sum(chances[:num_nodes]))
        assert list(parents) == sorted(parents), "depth by depth, siblings together"
        assert len(parents) == num_nodes


def test_the_cheapest_size_and_depth_are_chosen() -> None:
    rates, rng = [0.6, 0.2, 0.1], np.random.default_rng(0)
    for _ in range(5):
        nodes = (np.cumsum(rng.uniform(0.0, 0.4, 6)) + 1).tolist()
        costs = TreeCosts(nodes, [0.0, *[rng.uniform(0, 0.3)] * 6], 3)
        seconds = [costs.step(None)] + [
            (nodes[n] + depth_of(tree) * costs.pass_seconds[1]) / expected_tokens(tree, rates)
            for n in range(1, 6)
            for tree in trees(n)
            if depth_of(tree) <= 3
        ]
        best = plan_trees(rates, costs)[0]
        assert best.seconds_per_token == pytest.approx(min(seconds))


@pytest.mark.parametrize(
    ("costs", "tree"),
    [
        (TreeCosts([1.0, 9.0, 9.0], [0.0, 0.0, 0.0], 2), None),
        (TreeCosts([1.0, 1.0, 1.0, 9.0], [0.0, 9.0, 9.0, 9.0], 1), None),
        (TreeCosts([1.0, 1.0, 1.0, 9.0], [0.0, 0.0, 0.0, 0.0], 1), "2"),
        (TreeCosts([1.0, 1.0, 1.0, 9.0], [0.0, 0.0, 0.0, 0.0], 2), "1,1"),
    ],
)
def test_costs_decide_between_no_tree_a_wide_and_a_deep_one(costs, tree) -> None:
    assert plan_trees([0.6, 0.2], costs)[0].tree == (None if tree is None else TreeShape.parse(tree))


def test_a_pass_of_the_draft_costs_its_rows() -> None:
    costs = TreeCosts([0.0] * 10, [0.0, *(100.0**rows for rows in range(9))], 3)
    assert costs.step(TreeShape.parse("3,2+0+1,1+0+2")) == 1 + 100 + 100
    assert costs.step(TreeShape.parse("3,1")) == 1 + 100**2


def test_the_choice_rests_on_what_the_trace_accepts() -> None:
    trace = traced()
    costs = TreeCosts([1 + 0.03 * rows for rows in range(17)], [0.0, *[0.1] * 16], 4)
    found = choose_trees(trace, "draft", costs, 3)
    assert len({not_none(one.tree).depth for one in found}) == 3
    assert [one.seconds_per_token for one in found] == sorted(one.seconds_per_token for one in found)
    for one in found:
        tree = not_none(one.tree)
        tokens = replay_tree(trace, "draft", tree.parents).tokens_per_step().median
        assert (one.tokens_per_step, tree.is_chain) == (tokens, False)
        assert one.seconds_per_token == pytest.approx(costs.step(tree) / tokens)
    promised = plan_trees(acceptance_by_rank(trace, "draft"), costs)[0]
    assert found[0].tokens_per_step == pytest.approx(promised.tokens_per_step, rel=0.2)
    for other in ("1", "1,1,1", "4", "2,2"):
        tree = TreeShape.parse(other)
        tokens = replay_tree(trace, "draft", tree.parents).tokens_per_step().median
        assert costs.step(tree) / tokens >= found[0].seconds_per_token
