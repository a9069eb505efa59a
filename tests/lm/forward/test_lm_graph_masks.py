"""Tokens of a PARD draft in CUDA graphs: as they are drafted without.

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
from tiny_engine import PROMPTS, decode, tokens
from tiny_models import VOCAB, make_tiny
from tiny_pard import publish_pard
from typed import not_none

from specdec_cli import drafters
from specdec_cli.drafters.contract import DraftRow, Resources
from specdec_cli.lm.forward import graphs
from specdec_cli.lm.load import load_lm
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape

GREEDY = SamplingParams(max_new_tokens=24)
CHANCE = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5)


@pytest.fixture
def made(tmp_path, device, recorder):  # noqa: F811
    """A target, and a draft twice: as it is, and in graphs. Blocks have four tokens."""
    how: dict[str, Any] = {"device": device, "block_size": 4, "max_num_seqs": 4, "check": False}
    target = load_lm(str(make_tiny("llama", tmp_path / "target", 1)), decoder="graphs", **how)
    folder = str(publish_pard(tmp_path / "draft"))
    return target, *(loaded(load_lm(folder, decoder=one, **how)) for one in ("transformers", "graphs"))


def loaded(lm) -> Any:
    made: Any = drafters.create("pard", {"model": lm.name})
    made.load(Resources(lambda _: lm, None, VOCAB))
    return made


def row(handle: int, text: list[int], k: int = 4, params: SamplingParams = GREEDY, **more: Any) -> DraftRow:
    return DraftRow(handle, text, 3, k, params, frozenset(), params.temperature > 0, False, 0.0, **more)


def both(plain, recorded, rows: list[DraftRow]) -> tuple[list[Any], list[Any]]:
    """The guesses without graphs and with them, whose tokens are the same."""
    expected, found = plain.propose([replace(one) for one in rows]), recorded.propose(rows)
    recorded.lm.check_integrity()
    assert [guess.unread is not None for guess in found] == [one.tree is None for one in rows], "who has not waited"
    found = [guess.read() for guess in found]
    assert [guess.drafted for guess in found] == [guess.drafted for guess in expected]
    return expected, found


def test_guesses_in_graphs_are_those_without(made) -> None:
    """Behind texts of all kinds, one of them longer than a graph is made for, and beside a tree."""
    _, plain, recorded = made
    texts = {0: TEXT[:9], 1: [*TEXT, *TEXT[3:23]], 2: TEXT[20:22]}
    for accepted in ([3, 0, 2], [0, 4, 1], [1, 2, 0]):
        rows = [row(handle, text) for handle, text in texts.items()]
        rows[0].k = 3
        guesses, _ = both(plain, recorded, rows)
        assert [len(guess.drafted) for guess in guesses] == [3, 4, 4]
        for text, guess, num in zip(texts.values(), guesses, accepted, strict=True):
            text += [*guess.drafted.tokens[:num], 5 + len(text) % 7]
    both(plain, recorded, [row(0, texts[0]), row(1, texts[1], tree=TreeShape.parse("2,1")), row(2, texts[2], 1)])


@pytest.mark.parametrize("cut", [{}, {"top_k": 20}])
def test_drawn_tokens_are_those_without(cut: dict[str, Any], made) -> None:
    """Beside a greedy row, with the q that they were drawn from."""
    _, plain, recorded = made
    params = replace(CHANCE, **cut)
    rows = [row(0, TEXT[:9], params=params), row(1, TEXT[20:33]), row(2, TEXT[30:34], 2, replace(params, index=1))]
    expected, found = both(plain, recorded, rows)
    assert found[1].q is None
    for theirs, own in ((expected[0], found[0]), (expected[2], found[2])):
        torch.testing.assert_close(not_none(own.q), not_none(theirs.q), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("verify", ["auto", "synthetic"])
@pytest.mark.parametrize("params", [GREEDY, CHANCE])
def test_texts_are_those_without(params: SamplingParams, verify: str, made) -> None:
    """Synthetic verification accepts all tokens, some, and none."""
    target, plain, recorded = made
    options: dict[str, Any] = {"verify": verify}
    if verify == "synthetic":
        options["synthetic_acceptance_rates"] = (0.8, 0.7, 0.5)
    expected, found = (decode(target, one, 3, PROMPTS, params, **options) for one in (plain, recorded))
    assert tokens(found) == tokens(expected)
    counts = [[one.speculative.num_accepted_tokens for one in outputs] for outputs in (found, expected)]
    assert counts[0] == counts[1]
    assert recorded.lm.num_free_blocks == recorded.lm.num_blocks, "an idle engine holds blocks"


def one_place_off(bucket, feeds, lengths, lasts):
    """The token before a sequence's last one is taken for it."""
    return real_values(bucket, feeds, lengths, [last - 1 for last in lasts])


def masks_as_padding(bucket, feeds, lengths, lasts):
    """Masks are not fed."""
    return real_values(bucket, feeds, [last + 1 for last in lasts], lasts)


real_values = graphs.values


@pytest.mark.parametrize("fault", [one_place_off, masks_as_padding])
def test_planted_faults_are_caught(fault, made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "values", fault)
    with pytest.raises(AssertionError):
        test_guesses_in_graphs_are_those_without(made)
