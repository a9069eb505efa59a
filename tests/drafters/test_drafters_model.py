"""The draft model's loop: what is fed, what q is, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from typed import not_none

from specdec_cli.drafted import NOTHING
from specdec_cli.drafters import create
from specdec_cli.drafters.contract import Drafter, DraftRow, Resources
from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.door import Continuations, Row
from specdec_cli.measure.audit.table import LMWithoutWeights
from specdec_cli.sampling import noise
from specdec_cli.sampling.chain import ChainRow, distribution
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import RULES

NUM_TOKENS = 7


class Recorder(LMWithoutWeights):
    """A model whose logits follow from the last token; it writes down what it was given."""

    name, max_context, num_blocks, block_size, num_free_blocks = "recorder", 2000, 1, 1, 1

    def __init__(self, vocab_size: int = NUM_TOKENS + 1) -> None:
        self.vocab_size = vocab_size
        self.calls: list[list[tuple[int, list[int], int]]] = []
        self.released: list[int] = []
        self.table = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(1)) * 1.5
        self.table[:, NUM_TOKENS:] = 90.0  # padding: never to be drawn

    def score(self, rows: Sequence[Row]) -> torch.Tensor:
        self.calls.append([(row.handle, list(row.context), row.num_logits) for row in rows])
        wanted = [row for row in rows if row.num_logits]
        assert all(row.num_logits == 1 for row in wanted)
        return torch.stack([self.table[row.context[-1]] for row in wanted]) if wanted else torch.empty(0, 8)

    def release(self, handle: int) -> None:
        self.released.append(handle)


def load(lm: Recorder) -> Drafter:
    drafter = create("model", {"model": "tiny"})
    drafter.load(Resources(lambda name: lm, None, NUM_TOKENS))
    return drafter


def row(
    context: list[int], k: int, verify: str = "block", handle: int = 0, p_min: float = 0.0, **params: Any
) -> DraftRow:
    rule = RULES[verify]
    chosen = SamplingParams(**{"temperature": 0.9, **params})
    return DraftRow(handle, context, 1, k, chosen, frozenset({6}), rule.needs_q, rule.shares_noise, p_min)


def test_rounds_feed_all_but_the_last_drafted_token() -> None:
    lm = Recorder()
    batch = [row([1, 2], 3), row([3], 1, handle=5), row([4, 4, 4], 2, handle=9)]
    guesses = load(lm).propose(batch)
    assert [len(guess.drafted) for guess in guesses] == [3, 1, 2]
    assert [[handle for handle, _, _ in call] for call in lm.calls] == [[0, 5, 9], [0, 9], [0]]
    assert lm.calls[2] == [(0, [1, 2, *guesses[0].drafted.tokens[:2]], 1)]


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_q_is_what_was_sampled_from(verify: str) -> None:
    lm = Recorder()
    batch = [row([1, 2], 4, verify, top_k=4, presence_penalty=0.7, min_tokens=9)]
    (guess,) = load(lm).propose(batch)
    assert guess.q is not None
    assert guess.q.dtype == torch.float32
    for j in range(4):
        context = [1, 2, *guess.drafted.tokens[:j]]
        chain = [ChainRow(batch[0].params, context, 1, NOTHING, frozenset({6}))]
        torch.testing.assert_close(
            guess.q[j : j + 1], distribution(lm.table[context[-1]][None], chain, NUM_TOKENS).dense()
        )
    assert not guess.q[:, 6].any(), "the stop token is banned before min_tokens"


def test_drafted_tokens_follow_q() -> None:
    counts = np.zeros(NUM_TOKENS)
    lm = Recorder()
    drafter = load(lm)
    for start in range(0, 3000, 500):
        batch = [row([2], 1, "rejection", handle=i, index=i) for i in range(start, start + 500)]
        for guess in drafter.propose(batch):
            counts[guess.drafted.tokens[0]] += 1
    expected = (lm.table[2, :NUM_TOKENS] / 0.9).softmax(-1).numpy() * 3000
    assert ((counts - expected) ** 2 / expected).sum() < 22.5, "chi-square, 6 degrees of freedom, p = 0.001"


@pytest.mark.parametrize("verify", ["block", "gumbel"])
def test_every_position_has_its_own_noise(verify: str) -> None:
    lm = Recorder()
    lm.table[:] = lm.table[0].clone()
    drafter = load(lm)
    repeats = [
        len(set(guess.drafted.tokens)) == 1
        for seed in range(20)
        for guess in drafter.propose([row([1], 4, verify, seed=seed)])
    ]
    assert sum(repeats) < 10


@pytest.mark.parametrize("verify", ["gumbel", "exact-match", "typical"])
def test_q_is_left_out_where_nobody_looks(verify: str) -> None:
    assert load(Recorder()).propose([row([1], 3, verify)])[0].q is None


def test_greedy_is_the_argmax_without_q() -> None:
    lm = Recorder()
    batch = [row([1], 3, "block", temperature=0.0), row([1], 3, "block", handle=1)]
    greedy, sampled = load(lm).propose(batch)
    assert greedy.q is None
    assert sampled.q is not None
    token = 1
    for guessed in greedy.drafted.tokens:
        token = int(lm.table[token, :NUM_TOKENS].argmax())
        assert guessed == token


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_p_min_looks_at_q_before_the_draw(temperature: float) -> None:
    """The same tokens as without it, cut before the first position whose largest q is too small."""
    lm = Recorder()
    p_min = 0.45
    shapes = set()
    for seed in range(30):
        (full,) = load(lm).propose([row([1], 6, seed=seed, temperature=temperature)])
        (short,) = load(lm).propose([row([1], 6, seed=seed, temperature=temperature, p_min=p_min)])
        kept = 0
        for last in [1, *full.drafted.tokens[:-1]]:
            if (lm.table[last, :NUM_TOKENS] / (temperature or 1)).softmax(-1).max() < p_min:
                break
            kept += 1
        assert short.drafted.tokens == full.drafted.tokens[:kept]
        assert (short.q is None) == (temperature == 0 or kept == 0)
        shapes.add(kept)
    assert temperature == 0 or len(shapes) > 2


def test_long_contexts_are_fed_in_chunks() -> None:
    lm = Recorder()
    drafter = load(lm)
    context = [1] * 1200
    drafter.propose([row(context, 1)])
    assert [(len(c), n) for call in lm.calls for _, c, n in call] == [(512, 0), (1024, 0), (1200, 1)]
    lm.calls.clear()
    drafter.propose([row([*context, 2, 3], 1)])
    assert [(len(c), n) for call in lm.calls for _, c, n in call] == [(1202, 1)]
    drafter.release(0)
    assert lm.released == [0]


def test_it_drafts_no_further_than_it_can_read() -> None:
    lm = Recorder()
    lm.max_context = 5
    drafter = load(lm)
    assert drafter.max_context == 5
    assert [len(g.drafted) for g in drafter.propose([row([1] * 4, 8), row([1] * 6, 8, handle=1)])] == [2, 0]
    assert max(len(context) for call in lm.calls for _, context, _ in call) == 5


def test_a_draft_with_too_few_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="scores 5 tokens"):
        load(Recorder(vocab_size=5))


class Leaping(Recorder):
    """It goes on by itself, up to a context that it cannot leave, and writes down what it was asked.

    What it is to draw is drawn as a plain softmax at the row's temperature says.
    """

    def guess(self, rows: Sequence[Row], num_tokens: int, form: object = None) -> Continuations:  # type: ignore[override]
        self.asked = [(row.handle, list(row.context), row.num_logits) for row in rows]
        self.draws = {row.handle: row.draw for row in rows}
        found, q = [], {}
        for place, row in enumerate(rows):
            tokens: list[int] = []
            last, drawn_from = row.context[-1], []
            while len(tokens) < row.num_logits and self.table[last].isfinite().all():
                scores = self.table[last, :num_tokens]
                last = int(scores.argmax())
                if row.draw is not None:
                    drawn_from.append((scores / row.draw.temperature).softmax(dim=-1))
                    last = int((drawn_from[-1].double().cumsum(0) > row.draw.uniforms[len(tokens)]).nonzero()[0])
                tokens.append(last)
            found.append(tokens)
            if row.draw is not None:
                q[place] = torch.stack(drawn_from)
        return Continuations(found, q=q)


def test_plain_rows_are_guessed_in_one_call() -> None:
    batch = [
        row([1, 2], 4, temperature=0.0),
        row([3], 2, handle=1, verify="gumbel"),
        row([4], 3, handle=2, temperature=0.0, p_min=0.01),
        row([5], 3, handle=3, temperature=0.0, presence_penalty=0.5),
        row([2], 2, handle=4, temperature=0.0, min_tokens=3),
        row([1] * 1999, 4, handle=5, temperature=0.0),
        row([5, 1], 5, handle=6, temperature=0.7, seed=3, index=2),
        row([4], 3, handle=7, verify="exact-match"),
        row([3, 2], 3, handle=8, p_min=0.01),
    ]
    lm, by_scores = Leaping(), Recorder()
    found, expected = load(lm).propose(batch), load(by_scores).propose(batch)
    assert [guesses.drafted.tokens for guesses in found] == [guesses.drafted.tokens for guesses in expected]
    for one, other in zip(found, expected, strict=True):
        assert (one.q is None) == (other.q is None)
        assert one.q is None or torch.allclose(one.q, not_none(other.q))
    assert lm.asked == [(0, [1, 2], 4), (5, [1] * 1999, 2), (6, [5, 1], 5), (7, [4], 3)]
    assert {handle for call in lm.calls for handle, _, num in call if num} == {1, 2, 3, 4, 8}


def test_a_draw_carries_what_shapes_its_row_s_distribution() -> None:
    lm = Leaping()
    load(lm).propose(
        [row([1], 2, temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, seed=5, index=1), row([2], 1, handle=1)]
    )
    first, second = lm.draws[0], lm.draws[1]
    assert (not_none(first).temperature, not_none(first).top_k, not_none(first).top_p, not_none(first).min_p) == (
        0.7,
        3,
        0.9,
        0.1,
    )
    assert not_none(first).uniforms == noise.uniforms(5, 1, 1, noise.Purpose.DRAFT, 2).tolist()
    assert (not_none(second).temperature, not_none(second).top_k, not_none(second).top_p, not_none(second).min_p) == (
        0.9,
        None,
        1.0,
        0.0,
    )


@pytest.mark.parametrize("kind", [Leaping, Recorder])
def test_a_row_that_cannot_be_guessed_to_its_end_keeps_what_it_has(kind: type[Recorder]) -> None:
    lm = kind()
    second = int(lm.table[1, :NUM_TOKENS].argmax())
    lm.table[second] = float("nan")
    other = next(token for token in (4, 5) if token != second)
    found = load(lm).propose([row([other], 1, temperature=0.0), row([1], 3, handle=1, temperature=0.0)])
    assert [len(guesses.drafted) for guesses in found] == [1, 1]
    assert found[1].drafted.tokens == (second,)


def test_broken_logits_name_the_draft_and_the_row() -> None:
    lm = Recorder()
    lm.table[3] = float("nan")
    with pytest.raises(RunError, match="draft `tiny`") as error:
        load(lm).propose([row([1], 1), row([2], 1, handle=1), row([3], 2, handle=2)])
    assert error.value.row == 2  # type: ignore[attr-defined]
