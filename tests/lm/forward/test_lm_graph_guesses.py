"""Trees of a draft model, and tokens that come from one pass, in CUDA graphs: as they are drafted round by round.

On a CPU nothing can be recorded; there what would be recorded runs anew at each replay. On a GPU the same tests take
CUDA's graphs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from head_drafts import TEXT
from test_lm_head_graphs import device, recorder  # noqa: F401  # fixtures
from tiny_engine import PROMPTS, decode, drafter, tokens
from tiny_models import VOCAB, make_tiny
from tiny_pard import publish_pard

from specdec_cli import drafters
from specdec_cli.drafted import Drafted
from specdec_cli.drafters.contract import DraftRow, Resources
from specdec_cli.lm.forward import graphs
from specdec_cli.lm.load import load_lm
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape

GREEDY = SamplingParams(max_new_tokens=24)
CHANCE = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5)
TREES = ["3,2,1", "2,2+1,1", "dynamic:9"]


@pytest.fixture
def made(tmp_path, device, recorder):  # noqa: F811
    """Loads a target, and a drafter of a kind twice: as it is, and in graphs. Blocks have four tokens."""

    def load(kind: str) -> tuple[Any, Any, Any]:
        how: dict[str, Any] = {"device": device, "block_size": 4, "max_num_seqs": 4, "check": False}
        target = load_lm(str(make_tiny("llama", tmp_path / "target", 1)), decoder="graphs", **how)
        folder = tmp_path / "draft"
        if kind == "pard":
            publish_pard(folder)
        else:
            make_tiny("llama", folder, 2)
        plain, recorded = (load_lm(str(folder), decoder=one, **how) for one in ("transformers", "graphs"))
        return target, loaded(kind, plain), loaded(kind, recorded)

    return load


def loaded(kind: str, lm) -> Any:
    made = drafter(lm) if kind == "model" else drafters.create(kind, {"model": lm.name})
    made.load(Resources(lambda _: lm, None, VOCAB))
    return made


def row(handle: int, text: list[int], tree: str | None, params: SamplingParams = GREEDY, k: int = 4) -> DraftRow:
    shape = None if tree is None else TreeShape.parse(tree)
    return DraftRow(handle, text, 3, k, params, frozenset(), params.temperature > 0, False, 0.0, tree=shape)


def guessed(plain, recorded, rows: list[DraftRow]) -> list[Drafted]:
    """What both guess, which is the same."""
    expected = [guess.drafted for guess in plain.propose([replace(one) for one in rows])]
    found = recorded.propose(rows)
    assert all(guess.unread is not None for guess in found), "the host has not waited"
    recorded.lm.check_integrity()
    assert [guess.read().drafted for guess in found] == expected
    return expected


def go_on(texts: dict[int, list[int]], drafted: list[Drafted], accepted: list[int]) -> None:
    """Keep the path to a node of each sequence, and add another token."""
    for text, guess, node in zip(texts.values(), drafted, accepted, strict=True):
        text += [*guess.tokens_to(node), 5 + len(text) % 7]


KINDS = [("model", tree) for tree in TREES] + [("pard", tree) for tree in (None, *TREES)]


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize(("kind", "tree"), KINDS)
def test_guesses_in_graphs_are_those_of_rounds_without(kind: str, tree: str | None, made) -> None:
    """Behind texts of all kinds, one of them longer than a graph is made for, and cut by its k."""
    _, plain, recorded = made(kind)
    texts = {0: TEXT[:9], 1: [*TEXT, *TEXT[3:23]], 2: TEXT[20:22]}
    for accepted in ([-1, 3, 0], [2, -1, 1], [0, 1, 3]):
        rows = [row(handle, text, tree) for handle, text in texts.items()]
        rows[0].k = 3 if accepted[0] < 2 else 2
        drafted = guessed(plain, recorded, rows)
        assert [len(one) for one in drafted] == [one.most_nodes for one in rows]
        go_on(texts, drafted, accepted)
    other = [row(handle, text, None if tree else "2,1") for handle, text in texts.items()]
    guessed(plain, recorded, [row(0, texts[0], tree), *other[1:]])


@pytest.mark.in_turn(6, every=7)
@pytest.mark.parametrize("cut", [{}, {"top_k": 20}, {"top_k": 2}])
@pytest.mark.parametrize(
    ("kind", "tree"), [("model", None), ("pard", None), *((kind, tree) for kind, tree in KINDS if tree in TREES[:2])]
)
def test_guesses_in_graphs_are_drawn_as_without(kind: str, tree: str | None, cut: dict[str, Any], made) -> None:
    """Beside a greedy one, and one that the target's noise chooses."""
    _, plain, recorded = made(kind)
    params = replace(CHANCE, **cut)
    rows = [row(0, TEXT[:9], tree, params), row(1, TEXT[20:33], tree), row(2, TEXT[30:34], tree, params, 2)]
    rows.append(replace(row(3, TEXT[40:51], tree, params), needs_q=False, shares_noise=True))
    expected = plain.propose([replace(one) for one in rows])
    guesses = recorded.propose(rows)
    assert all(guess.unread is not None for guess in guesses), "the host has not waited"
    for own, theirs in zip((guess.read() for guess in guesses), expected, strict=True):
        assert own.drafted == theirs.drafted
        assert (own.q is None) == (theirs.q is None)
        if own.q is not None:
            torch.testing.assert_close(own.q, theirs.q, rtol=1e-3, atol=1e-4)


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize(("kind", "tree"), [("model", "2,2,1"), ("pard", None), ("pard", "2,2,1")])
@pytest.mark.parametrize("verify", ["auto", "synthetic"])
def test_texts_are_those_without_graphs(kind: str, tree: str | None, verify: str, made) -> None:
    """Synthetic verification accepts whole paths, parts, and nothing."""
    target, plain, recorded = made(kind)
    options: dict[str, Any] = {"tree": tree, "verify": verify}
    if verify == "synthetic":
        options["synthetic_acceptance_rates"] = (0.8, 0.7, 0.5)
    expected, found = (decode(target, one, 3, PROMPTS, GREEDY, **options) for one in (plain, recorded))
    assert tokens(found) == tokens(expected)
    counts = [[one.speculative.num_accepted_tokens for one in outputs] for outputs in (found, expected)]
    assert counts[0] == counts[1]
    assert recorded.lm.num_free_blocks == recorded.lm.num_blocks, "an idle engine holds blocks"


def one_place_too_far(values, *given):
    """The last known token of each sequence is taken for the one behind it."""
    bucket, feeds, lengths, lasts = given
    return values(bucket, feeds, lengths, [last - 1 for last in lasts])


def siblings_seen(begin, sees, depths, places, slots):
    """Nodes see all that was run before them."""
    return real_nodes(begin, torch.ones_like(sees), depths, places, slots)


real_nodes, real_values = graphs.nodes_of, graphs.values


@pytest.mark.parametrize(("kind", "name", "fault"), [
    ("model", "nodes_of", siblings_seen),
    ("model", "values", lambda *given: one_place_too_far(real_values, *given)),
    ("pard", "values", lambda *given: one_place_too_far(real_values, *given)),
])  # fmt: skip
def test_planted_faults_are_caught(kind: str, name: str, fault, made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, name, fault)
    with pytest.raises(AssertionError):
        test_guesses_in_graphs_are_those_of_rounds_without(kind, "3,2,1", made)


def test_a_tree_whose_nodes_stay_in_the_cache_is_caught(made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks behind the text are given back."""
    _, plain, recorded = made("model")
    feeds = recorded.lm._contexts.feeds
    monkeypatch.setattr(
        recorded.lm._contexts, "feeds", lambda rows, is_long: feeds(rows, is_long) if rows[0].num_logits else None
    )
    with pytest.raises(AssertionError, match="blocks, needs"):
        guessed(plain, recorded, [row(0, TEXT[:8], "3,2,1")])
