"""Faults planted one at a time: each must be seen by the test that a correct engine passes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from planted import forget_residuals, own_weights_of_p
from table_loop import Loop, Table, measured
from typed import not_none

from specdec_cli.drafters.contract import DraftRow
from specdec_cli.drafters.growing_draft import GrowingDraft, grow_whole
from specdec_cli.engine import verify as verify_module
from specdec_cli.engine.residual import Residuals
from specdec_cli.sampling import noise
from specdec_cli.sampling.params import SamplingParams

TABLE = Table.random()
PARAMS = SamplingParams(temperature=1.0)
ALARM = 1e-6


class SoftmaxAtZero(Loop):
    def distribution(self, logits, rows):
        return super().distribution(logits, [replace(row, params=replace(row.params, temperature=1.0)) for row in rows])


class QBeforeProcessors(Loop):
    def q_given(self, q, logits):
        return logits.softmax(dim=-1)


class StopsAfterADoubtfulDraw(Loop):
    """Drops a drafted token because its own q is small: the order that EXACTNESS.md forbids."""

    def keep_drafted(self, token, q_row):
        return bool(q_row[token] >= 0.4)


class StopsBeforeADoubtfulDraw(Loop):
    def keep_drafted(self, token, q_row):
        return bool(q_row.max() >= 0.6)


class CutByConfidence(Loop):
    """A confidence head that expects the second draft to stand after token 0 alone; the draft stops where it doubts.

    The counterexample of the DSpark paper (arXiv:2607.05147), section 3.2.2: p(0) = 0.7 and q(0) = 0.5.
    """

    p_min = 0.5

    def __init__(self, mode: str) -> None:
        p, q = (np.tile(np.log([share, 1 - share]), (2, 2, 1)) for share in (0.7, 0.5))
        super().__init__(Table(p, q), PARAMS, mode, 2, num_draws=2_000)

    def propose(self, contexts, running):
        rows = [
            DraftRow(i, contexts[i], len(self.prompt), 2, self.params[i], frozenset(), True, False, self.p_min)
            for i in running
        ]
        drafts, depths = (
            [GrowingDraft(row, place) for place, row in enumerate(rows)],
            dict.fromkeys(range(len(rows)), 2),
        )

        def logits(growing):
            return torch.from_numpy(self.table.q[0, 0]).float().expand(len(growing), -1)

        grow_whole(drafts, depths, logits, 2, "draft", lambda growing: torch.tensor([*map(confidence, growing)]))
        guesses = {draft.row.handle: draft.guesses() for draft in drafts}
        kept = {i: self.num_kept(guess.drafted.tokens) for i, guess in guesses.items()}
        tokens = {i: list(guess.drafted.tokens[: kept[i]]) for i, guess in guesses.items()}
        return tokens, {i: list(not_none(guess.q)[: kept[i]]) if kept[i] else [] for i, guess in guesses.items()}

    def num_kept(self, tokens):
        return len(tokens)


def confidence(draft: GrowingDraft) -> float:
    return 0.9 * (draft.tokens[0] == 0) if draft.tokens else 0.8


class CutAtTheBestOfAllLengths(CutByConfidence):
    """Looks ahead: whether token 1 is verified depends on the confidence behind it, and so on token 1."""

    p_min = 0.0

    def num_kept(self, tokens):
        expected = (1.0, 1.8, 1.8 + 0.8 * 0.9 * (tokens[0] == 0))
        rates = [tokens * steps for tokens, steps in zip(expected, (1.0, 0.5, 0.45), strict=True)]
        return rates.index(max(rates))


def off_by_one_bonus(own_weights):
    def patched(residuals, last):
        weights, forest = own_weights(residuals, last), residuals.forest
        is_full = [node < forest.num and not forest.children[node] for node in last]
        before = own_weights_of_p(residuals, [forest.parents[node] if node < forest.num else node for node in last])
        return torch.where(torch.tensor(is_full)[:, None], before, weights)

    return patched


def not_normalised(weights, uniforms):
    point = torch.as_tensor(uniforms)[:, None]
    found = torch.searchsorted(weights.cumsum(dim=-1, dtype=torch.float64), point, right=True)[:, 0]
    return found.clamp(max=weights.shape[1] - 1)


def shared_draws(many):
    return lambda seeds, indices, positions, purpose, n: many(seeds, indices, positions, noise.Purpose.DRAFT, n)


def keyed_by_position(many):
    """Offset j of a step that began at s takes the number of the absolute position s + j."""

    def patched(seeds, indices, positions, purpose, n):
        columns = [many(seeds, indices, [p + j for p in positions], purpose, 1) for j in range(n)]
        return np.concatenate(columns, axis=1)

    return patched


def p_value(mode: str = "rejection", loop=Loop, params=PARAMS, k=3, length=3, **settings):
    return measured(loop(settings.pop("table", TABLE), params, mode, k, **settings), params, length).p_value


def test_softmax_at_temperature_zero() -> None:
    params = SamplingParams(temperature=0.0)
    plain = Loop(TABLE, params, "rejection", 0, num_draws=50).run(8)
    assert Loop(TABLE, params, "rejection", 3, num_draws=50).run(8) == plain
    with pytest.raises(AssertionError, match="the rule of temperature 0 is greedy"):
        SoftmaxAtZero(TABLE, params, "rejection", 3, num_draws=50).run(8)


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_missing_residual(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_residuals(monkeypatch)
    assert p_value(mode) < ALARM


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_residual_not_normalised(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "inverse_cdf", not_normalised)
    assert p_value(mode) < ALARM


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_shared_uniform_draws(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "uniforms_many", shared_draws(noise.uniforms_many))
    assert p_value(mode) < ALARM


@pytest.mark.in_turn(0, every=4)
@pytest.mark.parametrize("mode", ["rejection", "block"])
@pytest.mark.parametrize("options", [{"temperature": 0.6}, {"top_k": 2}, {"repetition_penalty": 1.8}], ids=str)
def test_q_from_before_the_processors(mode: str, options) -> None:
    params = SamplingParams(**{"temperature": 1.0, **options})
    assert p_value(mode, QBeforeProcessors, params) < ALARM


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_off_by_one_bonus(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residuals, "own_weights", off_by_one_bonus(Residuals.own_weights))
    # The bonus is token k + 1, so the joint has to reach beyond k tokens.
    assert p_value(mode, k=2) < ALARM


@pytest.mark.slow
def test_block_verification_with_noise_keyed_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table.random(num_tokens=4, seed=5, disagreement=1.5)
    assert p_value("block", table=table, length=4, num_draws=12_000) > ALARM
    monkeypatch.setattr(noise, "uniforms_many", keyed_by_position(noise.uniforms_many))
    assert p_value("block", table=table, length=4, num_draws=12_000) < ALARM


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_p_min_decides_before_the_draw_and_not_after(mode: str) -> None:
    assert p_value(mode, StopsBeforeADoubtfulDraw) > ALARM
    assert p_value(mode, StopsAfterADoubtfulDraw) < ALARM


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_a_confidence_head_decides_on_a_token_by_those_before_it_alone(mode: str) -> None:
    assert measured(CutByConfidence(mode), PARAMS, 3).p_value > ALARM
    assert measured(CutAtTheBestOfAllLengths(mode), PARAMS, 3).p_value < ALARM
