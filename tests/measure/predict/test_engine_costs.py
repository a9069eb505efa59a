"""Costs of another engine, from runs whose every second is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specdec_cli.draft_shape import DraftShape
from specdec_cli.measure.predict.cost import ProfileLoad
from specdec_cli.measure.predict.draft_trace import GuessTrace, ModelTrace
from specdec_cli.measure.predict.engine_costs import EngineCosts, EngineRun, PassTotals, fit_costs
from specdec_cli.measure.predict.predict import predict
from specdec_cli.measure.predict.replay import replay, replay_unsure
from specdec_cli.measure.predict.trace import Trace, TracedPrompt
from specdec_cli.sampling.params import SamplingParams

PLAIN, BASE, SLOPE = 0.010, 0.003, 0.002
LOAD = ProfileLoad(0.0, 0.0, 2)


def counts(steps: int, drafts: int, drafted: int, accepted: int, slower: float = 1.0) -> PassTotals:
    seconds = (steps * PLAIN + drafts * BASE + drafted * SLOPE) * slower
    return PassTotals(seconds, steps + accepted, drafts, drafted, accepted)


def run_of(k: int, num: int = 6, accepted: int = 40, slower: float = 1.0) -> EngineRun:
    return EngineRun(k, tuple(counts(100, 100 if k else 0, 100 * k, accepted if k else 0, slower) for _ in range(num)))


def fit(*drafting: EngineRun, is_lookup: bool = False) -> EngineCosts:
    return fit_costs(run_of(0), drafting, 6, 1, LOAD, is_lookup=is_lookup)


def test_two_k_determine_the_form() -> None:
    made = fit(run_of(1), run_of(6))
    assert (made.plain_seconds, made.base_seconds, made.seconds_per_token) == pytest.approx((PLAIN, BASE, SLOPE))
    assert made.step_seconds(0) == pytest.approx(PLAIN)
    assert made.step_seconds(4) == pytest.approx(0.021)
    assert made.fitted_on == pytest.approx({DraftShape(1): 0, DraftShape(6): 0}, abs=1e-9)
    assert made.costs.rounds is not None
    assert len(made.costs.rounds) == 6
    assert made.costs.warning is None


def test_one_k_gives_the_slope_alone() -> None:
    made = fit(run_of(2))
    assert made.base_seconds == 0
    assert made.step_seconds(2) == pytest.approx(0.017)


def test_more_k_are_fitted_and_the_error_is_told() -> None:
    made = fit(run_of(1), run_of(3, slower=1.1), run_of(6))
    assert made.fitted_on[DraftShape(3)] < -0.03
    assert made.fitted_on[DraftShape(1)] > 0
    assert fit(run_of(1), run_of(6)).error(run_of(3, slower=1.1)) == pytest.approx(1 / 1.1 - 1)


def test_p_min_tells_a_draft_pass_from_a_verified_row() -> None:
    """Every other token is the draft's, which is sure of it alone: a draft ends at its first or second pass."""
    trace, a_pass = trace_of(42, beyond=2), 0.0005
    draft = trace.drafts["draft"]
    assert isinstance(draft, ModelTrace)
    trace.drafts["draft"] = replace(draft, confidence=np.where(draft.is_argmax, 0.9, 0.3).astype(np.float32))
    unsure = replay_unsure(trace, "draft", "greedy", 6, [0.5])
    replayed = unsure[DraftShape(6, p_min=0.5)]
    steps, drafted = replayed.num_steps[0], replayed.num_draft_tokens[0]
    assert (steps, drafted) == (20, 19), "all but the first step draft one token"
    stops = (replayed.steps_by_asked[0] * np.arange(7)).sum() - drafted
    seconds = steps * (PLAIN + BASE) + drafted * SLOPE + stops * a_pass
    totals = PassTotals(seconds, int(steps + 19), 19, int(drafted), 19)
    run = EngineRun(6, (totals,) * 6, p_min=0.5, replayed=replayed)
    made = fit_costs(run_of(0), [run_of(1), run_of(6), run], 6, 1, LOAD, is_lookup=False)
    assert (made.seconds_per_token, made.seconds_per_stop) == pytest.approx((SLOPE, a_pass))
    assert made.error(run) == pytest.approx(0, abs=1e-9)
    found = predict(replay(trace, "draft", "greedy", 6), made.costs, unsure=unsure).row(DraftShape(6, p_min=0.5))
    assert found is not None
    assert found.seconds[0] == pytest.approx(seconds)
    assert fit(run_of(1), run_of(6)).seconds_per_stop is None


def test_a_step_time_that_falls_with_k_is_told() -> None:
    assert fit(run_of(1), run_of(6)).doubt is None
    found = fit(run_of(1, slower=2.0), run_of(6)).doubt
    said = "by the fitted costs a step takes 30.00 ms at k = 1 and 25.00 ms at k = 6: drafting more takes no less time"
    assert found is not None
    assert found.startswith(said)
    nearly = fit(run_of(1, slower=1.68), run_of(6))
    assert nearly.seconds_per_token < 0
    assert nearly.doubt is None, "within what two starts differ by"
    found = fit(run_of(1, slower=0.5), run_of(6)).doubt
    assert found is not None
    assert found.startswith("by the fitted costs a step takes 10.00 ms without a draft and 7.50 ms at k = 1")


def test_a_draft_that_finds_nothing_costs_nothing() -> None:
    """Of 100 steps 40 draft: 40 tokens at k = 1, and 140 at k = 6, as some find less."""
    lookups = [EngineRun(k, (counts(100, 40, drafted, 20),) * 6) for k, drafted in ((1, 40), (6, 140))]
    made = fit(*lookups, is_lookup=True)
    assert (made.base_seconds, made.seconds_per_token) == pytest.approx((BASE, SLOPE))
    assert made.costs.draft_seconds.sum() == 0
    assert made.costs.target_seconds[0, [0, 4]] == pytest.approx([PLAIN, 0.021])


def test_steps_that_accept_past_an_end_are_counted_once() -> None:
    assert PassTotals(1.0, 10, 6, 12, 7).num_steps == 6
    assert PassTotals(1.0, 10, 2, 4, 3).num_steps == 7


def test_speedup_of_a_run() -> None:
    assert run_of(2).counts.acceptance_length == pytest.approx(1.4)
    assert run_of(0).counts.acceptance_length is None
    found = run_of(2).speedup_over(run_of(0))
    assert found.median == pytest.approx(1.4 * PLAIN / 0.017)
    assert found.ci95 == pytest.approx((found.median, found.median))
    assert run_of(2, num=1).speedup_over(run_of(0)).ci95 is None


def trace_of(num: int, beyond: int) -> Trace:
    """Every other token is the draft's."""
    output = tuple(range(num))
    prompts = [
        TracedPrompt((1,), output, 1 + num + beyond, SamplingParams(max_new_tokens=num), beyond=beyond)
        for _ in range(4)
    ]
    is_argmax = np.tile(np.arange(num) % 2 == 0, 4)
    log_q = np.where(is_argmax, -0.1, -4.0).astype(np.float32)
    draft = ModelTrace(log_q, is_argmax, np.zeros(4 * num, bool), None)
    return Trace("t", 100, (), None, prompts, np.zeros(4 * num, np.float32), {"draft": draft})


def test_a_prediction_takes_these_costs() -> None:
    """Steps begin at 1, 2 (which accepts one) and 4, 6…: after the first all accept one of k tokens."""
    trace = trace_of(42, beyond=2)
    made = predict(replay(trace, "draft", "greedy", 2), fit(run_of(1), run_of(6)).costs)
    steps = 1 + 19
    for row, seconds in zip(made.rows, (PLAIN + BASE + SLOPE, PLAIN + BASE + 2 * SLOPE), strict=True):
        assert row.replayed.num_steps.tolist() == [steps] * 4
        assert row.speedup.median == pytest.approx(39 * PLAIN / (steps * seconds))


def test_a_lookup_pays_for_what_it_finds() -> None:
    trace = trace_of(42, beyond=2)
    guessed = np.zeros((4 * 42, 2), np.int16)
    guessed[::4] = (1, 2)
    trace.drafts["ngram"] = GuessTrace(guessed, np.zeros_like(guessed), None)
    made = predict(replay(trace, "ngram", "greedy", 2), fit(run_of(1), run_of(6), is_lookup=True).costs)
    replayed = made.rows[1].replayed
    drafts, steps = replayed.num_drafts.sum(), replayed.num_steps.sum()
    assert 0 < drafts < steps
    expected = steps * PLAIN / (steps * PLAIN + drafts * (BASE + 2 * SLOPE))
    assert made.rows[1].speedup.median == pytest.approx(expected)
