"""Drafted trees: which nodes they have, where their q comes from, and what the draft model is asked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import log
from typing import Any

import pytest
import torch
from typed import not_none

from specdec_cli.drafted import CONTEXT_END, NOTHING, Drafted
from specdec_cli.drafters import create
from specdec_cli.drafters.contract import Drafter, DraftRow, Guesses, Resources
from specdec_cli.lm.door import Row
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.sampling.chain import ChainRow, Distribution, distribution
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape
from specdec_cli.verification import RULES

V = 8


class Watched(TableLM):
    """A table that writes down the rows of every call."""

    def __init__(self) -> None:
        table = TableLM.random(V, order=2, seed=4, scale=1.5)
        super().__init__(table._function, V, order=2)
        self.calls: list[list[Row]] = []

    def score(self, rows: Sequence[Row]) -> torch.Tensor:
        self.calls.append(list(rows))
        return super().score(rows)


def load(method: str = "model", lm: TableLM | None = None) -> Drafter:
    drafter = create(method, {"model": "tiny"} if method == "model" else {"min": 1})
    drafter.load(Resources(lambda name: lm or Watched(), None, V))
    return drafter


def row(
    tree: str | None, k: int, context: Sequence[int] = (1, 2, 3), verify: str = "rejection", handle: int = 0, **params
) -> DraftRow:
    rule = RULES[verify]
    chosen = SamplingParams(**{"temperature": 0.9, **params})
    return DraftRow(
        handle,
        list(context),
        1,
        k,
        chosen,
        frozenset({6}),
        rule.needs_q,
        rule.shares_noise,
        0.0,
        tree=None if tree is None else TreeShape.parse(tree),
    )


def q_after(row: DraftRow, path: Sequence[int]) -> Distribution:
    context = [*row.context, *path]
    logits = Watched().score([Row(0, context, 1)])
    return distribution(logits, [ChainRow(row.params, context, 1, NOTHING, row.stop_ids)], V)


def likelihoods(row: DraftRow, path: Sequence[int]) -> torch.Tensor:
    q = q_after(row, path)
    return q.scores[0].softmax(-1) if row.params.temperature == 0 else not_none(q.probs)[0]


def widths(drafted: Drafted) -> list[list[int]]:
    """The number of children of every node by depth, leaves left out."""
    found: list[list[int]] = [[] for _ in range(drafted.max_depth)]
    for node in range(CONTEXT_END, len(drafted)):
        if children := drafted.children(node):
            found[drafted.depth(node)].append(len(children))
    return found


@pytest.mark.parametrize("verify", ["rejection", "gumbel", "exact-match"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_static_tree_has_its_children_at_every_depth(temperature: float, verify: str) -> None:
    (guess,) = load().propose([row("4,2,1", 5, verify=verify, temperature=temperature)])
    assert widths(guess.drafted) == [[4], [2] * 4, [1] * 8]
    assert [guess.drafted.depth(node) for node in range(20)] == [1] * 4 + [2] * 8 + [3] * 8
    assert (guess.q is not None) == (verify == "rejection" and temperature > 0)


@pytest.mark.parametrize("verify", ["rejection", "gumbel", "exact-match"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_nodes_have_numbers_of_children_of_their_own(temperature: float, verify: str) -> None:
    lm = Watched()
    wanted = row("3,2+0+1,1+0+2", 5, verify=verify, temperature=temperature)
    (guess,) = load(lm=lm).propose([wanted])
    assert guess.drafted.parents == TreeShape.parse("3,2+0+1,1+0+2").parents
    asked = [call[0] for call in lm.calls]
    assert [len(one.drafted) for one in asked] == [0, 2, 4], "leaves are not read by the draft model"
    assert [one.num_logits for one in asked] == [1, 2, 2]
    for node, parent in enumerate(guess.drafted.parents):
        q = q_after(wanted, guess.drafted.tokens_to(parent))
        assert guess.q is None or torch.equal(guess.q[node], q.dense()[0])


def test_missing_nodes_take_those_below_them_along() -> None:
    (guess,) = load().propose([row("3,2+1+1,1+0+2", 3, top_k=2)])
    assert guess.drafted.parents == (-1, -1, 0, 0, 1, 2, 4, 4), "the second child has a third grandchild below it"


def test_k_cuts_a_tree_and_the_nodes_before_stay() -> None:
    (whole,) = load().propose([row("3,2,2", 3)])
    (cut,) = load().propose([row("3,2,2", 2)])
    assert cut.drafted == whole.drafted.first(9)
    assert torch.equal(not_none(cut.q), not_none(whole.q)[:9])


@pytest.mark.parametrize(
    ("verify", "params"),
    [
        *product(["rejection", "gumbel"], [{}, {"top_k": 3}, {"presence_penalty": 0.7, "min_tokens": 9}]),
        *product(["rejection", "gumbel", "exact-match"], [{"temperature": 0.0}]),
    ],
)
def test_a_tree_without_siblings_is_the_chain(verify: str, params: dict[str, Any]) -> None:
    chain, tree = (load().propose([row(shape, 4, verify=verify, **params)])[0] for shape in (None, "1,1,1,1"))
    assert chain.drafted == tree.drafted
    assert chain.drafted.is_chain
    assert (chain.q is None) == (tree.q is None)
    assert chain.q is None or torch.equal(chain.q, not_none(tree.q))


def test_q_is_that_of_the_parent() -> None:
    wanted = row("3,2,2", 3, top_k=4, presence_penalty=0.7, min_tokens=9)
    (guess,) = load().propose([wanted])
    assert guess.q is not None
    assert guess.q.shape == (len(guess.drafted), V)
    for node, parent in enumerate(guess.drafted.parents):
        expected = q_after(wanted, guess.drafted.tokens_to(parent))
        torch.testing.assert_close(guess.q[node : node + 1], expected.dense())
        assert guess.q[node, guess.drafted.tokens[node]] > 0


def test_fewer_tokens_that_can_occur_make_fewer_children() -> None:
    (guess,) = load().propose([row("4,2,1", 3, top_k=3)])
    assert widths(guess.drafted) == [[3], [2] * 3, [1] * 6]
    (guess,) = load().propose([row("4,2,1", 3, top_k=1)])
    assert guess.drafted.is_chain
    assert len(guess.drafted) == 3


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 4, 16, 60])
def test_a_dynamic_tree_has_the_most_likely_nodes(budget: int, k: int, temperature: float) -> None:
    wanted = row(f"dynamic:{budget}", k, temperature=temperature)
    (guess,) = load().propose([wanted])
    scores = {
        path: sum(log(likelihoods(wanted, path[:i])[token]) for i, token in enumerate(path))
        for depth in range(1, k + 1)
        for path in product(range(V), repeat=depth)
    }
    best = sorted(scores.values(), reverse=True)[:budget]
    found = sorted((scores[guess.drafted.tokens_to(node)] for node in range(len(guess.drafted))), reverse=True)
    assert found == pytest.approx(best, abs=1e-4)
    assert guess.q is None


def test_children_of_a_likely_tree_descend() -> None:
    wanted = row("dynamic:30", 4)
    (guess,) = load().propose([wanted])
    for node in range(CONTEXT_END, len(guess.drafted)):
        q = likelihoods(wanted, guess.drafted.tokens_to(node))
        order = [float(q[guess.drafted.tokens[child]]) for child in guess.drafted.children(node)]
        assert order == sorted(order, reverse=True)


def test_one_call_a_depth_over_all_rows() -> None:
    lm = Watched()
    batch = [row("3,2", 4), row(None, 3, [4], handle=1), row("dynamic:5", 3, [1, 1], handle=2), row("2,2", 1, handle=3)]
    guesses = load(lm=lm).propose(batch)
    assert [[one.handle for one in call] for call in lm.calls] == [[0, 1, 2, 3], [0, 1, 2], [1, 2]]
    asked = lm.calls[1][0]
    assert asked.drafted == guesses[0].drafted.first(3)
    assert (asked.num_logits, list(asked.context)) == (3, [1, 2, 3])
    assert list(lm.calls[1][1].context) == [4, *guesses[1].drafted.tokens[:1]]
    assert lm.calls[1][1].drafted == NOTHING


def test_a_tree_alone_and_in_company_is_the_same() -> None:
    shapes = ["4,2,1", None, "dynamic:16", "2,2,2", "dynamic:60", None]
    verifies = ["rejection", "gumbel", "exact-match"] * 2
    batch = [row(s, 3, [i, 2], v, i, index=i) for i, (s, v) in enumerate(zip(shapes, verifies, strict=True))]
    together = load().propose(batch)
    for one, guess in zip(batch, together, strict=True):
        (alone,) = load().propose([one])
        assert alone.drafted == guess.drafted
        assert (alone.q is None) == (guess.q is None)
        assert alone.q is None or torch.equal(alone.q, not_none(guess.q))


def test_an_unsure_node_gets_no_children() -> None:
    wanted = row("3,2", 2, [1, 2])
    (whole,) = load().propose([wanted])
    sure = [float(likelihoods(wanted, whole.drafted.tokens_to(node)).max()) for node in range(3)]
    wanted.p_min = sorted(sure)[1]
    assert float(likelihoods(wanted, []).max()) > wanted.p_min, "the first tokens are sure"
    (guess,) = load().propose([wanted])
    assert [bool(guess.drafted.children(node)) for node in range(3)] == [one >= wanted.p_min for one in sure]


def test_the_draft_models_context_limits_the_depth() -> None:
    lm = Watched()
    lm.max_context = 4
    (guess,) = load(lm=lm).propose([row("3,2,1", 3)])
    assert guess.drafted.max_depth == 2


def merged(context: Sequence[int], shape: str, k: int) -> Guesses:
    return load("ngram").propose([row(shape, k, context)])[0]


def test_ngram_branches_where_earlier_texts_went_on_differently() -> None:
    context = [1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3, 5, 0, 1, 2]
    guess = merged(context, "2,2,1", 3)
    assert guess.q is None
    assert [guess.drafted.tokens_to(node) for node in range(len(guess.drafted))] == [
        (3,),
        (3, 5),
        (3, 5, 0),
        (4,),
        (4, 0),
        (4, 0, 1),
        (3, 0),
        (3, 0, 1),
    ]
    assert merged(context, "dynamic:4", 3).drafted == guess.drafted.first(4)
    chain = load("ngram").propose([row(None, 3, context)])[0].drafted
    assert merged(context, "1,1,1", 3).drafted == chain
    assert not merged([1, 2, 3], "2,2", 2).drafted


def test_ngram_finds_all_earlier_places_after_a_cut_back() -> None:
    drafter, fresh = load("ngram"), load("ngram")
    context = [1, 2, 3, 1, 2, 4, 1, 2]
    first = drafter.propose([row("3,3", 2, context)])
    drafter.propose([row("3,3", 2, [*context, 7, 1, 2, 5, 1, 2])])
    assert drafter.propose([row("3,3", 2, context)]) == first == fresh.propose([row("3,3", 2, context)])


def test_who_builds_trees() -> None:
    assert load().builds_trees
    assert load("ngram").builds_trees
    assert not create("none", {}).builds_trees
    assert not create("prediction", {"text": "a"}).builds_trees
    assert [load().draws, load("ngram").draws] == [True, False]


def test_ngram_fills_each_node_of_a_shape() -> None:
    context = [1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3, 5, 0, 1, 2]
    (whole, narrow) = (merged(context, shape, 3).drafted for shape in ("2,2,1", "2,2+0,1"))
    assert {narrow.tokens_to(node) for node in range(len(narrow))} == {
        path for path in (whole.tokens_to(node) for node in range(len(whole))) if path[0] == 3 or len(path) == 1
    }
