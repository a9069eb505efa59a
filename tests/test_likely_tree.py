"""The likeliest nodes of trees, against a search on plain lists; probabilities often tie."""

from math import log

import pytest
import torch
from torch import Tensor

from specdec_cli.drafted import CONTEXT_END
from specdec_cli.likely_tree import LikelyTrees, likeliest

NUM_NODES, NUM_TREES, VOCAB = 9, 5, 12


def probabilities(*shape: int) -> Tensor:
    """Of a few sizes only, and some are 0."""
    sizes = torch.tensor([0.0, 0.125, 0.125, 0.25, 0.5, 0.5])
    return sizes[torch.randint(len(sizes), shape, generator=torch.Generator().manual_seed(sum(shape)))]


def listed(values: list[float], first: int, num: int) -> list[tuple[int, float]]:
    order = sorted(enumerate(values), key=lambda pair: (pair[0] != first, -pair[1], pair[0]))
    return order[:num]


class ListedTree:
    """One tree."""

    def __init__(self) -> None:
        self.nodes: list[tuple[int, int, float]] = []  # token, parent, score
        self.ends = [CONTEXT_END]

    def grow(self, children: list[list[tuple[int, float]]]) -> None:
        offered, num = list(self.nodes), len(self.nodes)
        for end, likely in zip(self.ends, children, strict=True):
            above = 0.0 if end == CONTEXT_END else self.nodes[end][2]
            offered += [(token, end, above + log(p)) for token, p in likely if p > 0]
        best = sorted(sorted(range(len(offered)), key=lambda node: (-offered[node][2], node))[:NUM_NODES])
        number = {CONTEXT_END: CONTEXT_END} | {node: i for i, node in enumerate(best)}
        self.nodes = [(token, number[parent], score) for token, parent, score in (offered[node] for node in best)]
        self.ends = [i for i, node in enumerate(best) if node >= num]


def test_the_likeliest_tokens_descend_and_equals_come_by_their_ids() -> None:
    values = probabilities(40, VOCAB) + 2**-10
    largest = values == values.amax(1, keepdim=True)
    first = torch.where(largest, torch.arange(VOCAB), -1).amax(1)  # not the one that comes first by its id
    for num in (1, 3, VOCAB, VOCAB + 1):
        tokens, found = likeliest(values, first, num)
        for its, row_values, row, leading in zip(tokens, found, values, first, strict=True):
            pairs = [*zip(its.tolist(), row_values.tolist(), strict=True)]
            expected = listed(row.tolist(), int(leading), num)
            assert [value for _, value in pairs] == [value for _, value in expected]
            assert pairs[0] == expected[0]
            if num >= VOCAB:  # of those that tie at the cut, any may stay
                assert pairs == expected


def test_trees_grow_as_on_lists() -> None:
    """Batched, with ends that are nothing, until no node has children."""
    trees, listed_trees = LikelyTrees.empty(NUM_TREES, NUM_NODES, torch.device("cpu")), [ListedTree() for _ in range(5)]
    for depth in range(5):
        ends = trees.new(NUM_NODES) if depth else torch.full((NUM_TREES, 1), CONTEXT_END)
        chances = probabilities(NUM_TREES, ends.shape[1], 7 + depth).sort(-1, descending=True).values
        chances[1] *= depth < 2
        tokens = torch.arange(chances.numel()).view(chances.shape) % 50
        pairs = torch.stack((tokens.double(), chances.double()), -1)
        before = trees
        trees, numbers = trees.grown(ends, tokens, chances)
        for row, tree in enumerate(listed_trees):
            assert ends[row, : len(tree.ends)].tolist() == tree.ends
            assert set(ends[row, len(tree.ends) :].tolist()) <= {NUM_NODES}
            tree.grow([[(int(t), p) for t, p in its] for its in pairs[row, : len(tree.ends)].tolist()])
            num = len(tree.nodes)
            assert trees.is_there[row].tolist() == [True] * num + [False] * (NUM_NODES - num)
            assert trees.tokens[row, :num].tolist() == [token for token, _, _ in tree.nodes]
            assert trees.parents[row, :num].tolist() == [parent for _, parent, _ in tree.nodes]
            old = numbers[row] < NUM_NODES
            assert before.tokens[row][numbers[row][old]].tolist() == trees.tokens[row][old].tolist()
            assert old.sum() == trees.num_old[row]


def newest_first(self: LikelyTrees, ends: Tensor, tokens: Tensor, chances: Tensor) -> tuple[LikelyTrees, Tensor]:
    """Of equally likely children the last ones are kept."""
    return true_grown(self, ends, tokens.flip(2), chances.flip(2))


def largest_id_first(values: Tensor, first: Tensor, num: int) -> tuple[Tensor, Tensor]:
    tokens, largest = true_likeliest(values.flip(-1), values.shape[-1] - 1 - first, num)
    return values.shape[-1] - 1 - tokens, largest


def cut_one(self: LikelyTrees, most: int) -> Tensor:
    """An old node is offered children again."""
    return torch.where(self.num_old > 0, true_new(self, most) - 1, true_new(self, most))


true_grown, true_likeliest, true_new = LikelyTrees.grown, likeliest, LikelyTrees.new


@pytest.mark.parametrize(("name", "fault"), [("grown", newest_first), ("new", cut_one)])
def test_planted_faults_of_trees_are_caught(name: str, fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LikelyTrees, name, fault)
    with pytest.raises(AssertionError):
        test_trees_grow_as_on_lists()


def test_a_planted_order_of_ties_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "likeliest", largest_id_first)
    with pytest.raises(AssertionError):
        test_the_likeliest_tokens_descend_and_equals_come_by_their_ids()
