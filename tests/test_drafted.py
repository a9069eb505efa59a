"""The tree of drafted tokens; a chain is the tree with one child per node."""

from __future__ import annotations

import dataclasses
import random

import pytest

from specdec_cli.drafted import CONTEXT_END, MOST_NODES, NOTHING, Drafted
from specdec_cli.errors import RunError

#        0: 5           1: 6
#     2: 7   3: 8       5: 7
#     4: 9
TREE = Drafted((5, 6, 7, 8, 9, 7), (-1, -1, 0, 0, 2, 1))
CHAIN = Drafted.chain([5, 5, 6])
SLOW_CHAIN = Drafted((5, 5, 6), (-1, 0, 1))


def walked(drafted: Drafted, node: int) -> tuple[int, ...]:
    """The path to a node, from its parents alone."""
    path: list[int] = []
    while node != CONTEXT_END:
        path.insert(0, node)
        node = drafted.parents[node]
    return tuple(path)


@pytest.mark.parametrize("drafted", [TREE, CHAIN, NOTHING], ids=["tree", "chain", "nothing"])
def test_every_answer_follows_from_the_parents(drafted: Drafted) -> None:
    for node in range(CONTEXT_END, len(drafted)):
        path = walked(drafted, node)
        assert drafted.path(node) == path
        assert drafted.depth(node) == len(path)
        assert drafted.tokens_to(node) == tuple(drafted.tokens[i] for i in path)
        assert drafted.ancestors(node) == sum(2**i for i in path)
        children = [i for i in range(len(drafted)) if drafted.parents[i] == node]
        assert drafted.children(node) == children
        for token in range(12):
            with_token = [i for i in children if drafted.tokens[i] == token]
            assert drafted.child(node, token) == (with_token[0] if with_token else None)
    depths = [len(walked(drafted, node)) for node in range(CONTEXT_END, len(drafted))]
    assert drafted.max_depth == max(depths)
    for depth in range(-1, 6):
        assert list(drafted.places_before(depth)) == [place for place, its in enumerate(depths) if its < depth]


@pytest.mark.parametrize("drafted", [TREE, CHAIN, NOTHING], ids=["tree", "chain", "nothing"])
def test_a_walk_goes_down_as_long_as_a_child_has_the_chosen_token(drafted: Drafted) -> None:
    for seed in range(200):
        chosen = random.Random(seed).choices(range(5, 9), k=len(drafted) + 1)
        path = drafted.walk(chosen)
        node = path[-1] if path else CONTEXT_END
        assert path == walked(drafted, node)
        assert all(drafted.tokens[i] == chosen[drafted.parents[i] + 1] for i in path)
        assert drafted.child(node, chosen[node + 1]) is None


def test_a_chain_is_the_tree_whose_parents_count_from_minus_one() -> None:
    assert SLOW_CHAIN == CHAIN
    assert hash(SLOW_CHAIN) == hash(CHAIN)
    assert SLOW_CHAIN.is_chain
    assert not TREE.is_chain
    assert NOTHING.is_chain
    assert not NOTHING
    assert list(CHAIN.parents) == [-1, 0, 1]


def test_a_chain_may_be_longer_than_a_trees_mask() -> None:
    chain = Drafted.chain(range(200))
    assert chain.ancestors(199) == 2**200 - 1
    assert chain.depth(199) == 200


@pytest.mark.parametrize(
    ("tokens", "parents", "said"),
    [
        ((1, 2), (-1,), "`2` tokens and `1` parents"),
        ((1, 2), (-1, 1), "node `1` .* parent `1`"),
        ((1, 2), (1, -1), "node `0` .* parent `1`"),
        ((1, 2), (-1, -2), "node `1` .* parent `-2`"),
        ((1, 2, 1), (-1, -1, -1), "two siblings"),
        (tuple(range(MOST_NODES + 1)), (-1,) * (MOST_NODES + 1), "`65` nodes"),
    ],
)
def test_what_is_no_tree_is_refused(tokens: tuple[int, ...], parents: tuple[int, ...], said: str) -> None:
    with pytest.raises(RunError, match=said):
        Drafted(tokens, parents)


def test_a_full_tree_fits_a_64_bit_mask() -> None:
    tree = Drafted(tuple(range(MOST_NODES)), (-1, -1, *range(1, MOST_NODES - 1)))
    assert tree.ancestors(MOST_NODES - 1) == 2**64 - 2
    assert tree.max_depth == MOST_NODES - 1


def test_the_first_nodes_are_a_tree() -> None:
    assert TREE.first(3) == Drafted((5, 6, 7), (-1, -1, 0))
    assert TREE.first(1) == Drafted.chain([5])
    assert TREE.first(9) is TREE
    assert CHAIN.first(2) == Drafted.chain([5, 5])
    assert CHAIN.first(0) == NOTHING


def test_kept_nodes_get_new_numbers() -> None:
    assert TREE.keep([5, 1, 0]) == Drafted((5, 6, 7), (-1, -1, 1))
    assert TREE.keep([0, 2, 4]) == Drafted.chain([5, 7, 9])
    assert TREE.keep([]) == NOTHING
    assert CHAIN.keep(range(2)) == CHAIN.first(2)
    with pytest.raises(AssertionError, match="together with its parent"):
        TREE.keep([0, 4])


def test_other_tokens_on_the_same_nodes() -> None:
    assert TREE.with_tokens(range(6)).parents == TREE.parents
    assert CHAIN.with_tokens([1, 2, 3]) == Drafted.chain([1, 2, 3])


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CHAIN.tokens = ()  # type: ignore[misc]
    assert not hasattr(CHAIN, "__dict__")
