"""Costs and predictions against a clock that only the models move, so that every second is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from typed import not_none

from specdec_cli.document import as_json
from specdec_cli.drafters import create
from specdec_cli.drafters.contract import Resources
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.engine.synthetic import iid_length
from specdec_cli.engine.verify import verify
from specdec_cli.errors import UsageError
from specdec_cli.events import Stepped
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.measure.documents.sweep_k import costs_result
from specdec_cli.measure.predict.cost import ENOUGH, Costs, ProfileLoad, Rounds
from specdec_cli.measure.predict.predict import choose, predict
from specdec_cli.measure.predict.profiling import MAX_REPEATS, MIN_REPEATS, profile
from specdec_cli.measure.predict.replay import Replay, replay
from specdec_cli.measure.predict.tracing import trace_draft, trace_target
from specdec_cli.measure.predict.tree_costs import TreeCosts, probe_trees
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape

V = 8


class Clock:
    """Every model's forward moves it; each look at it takes a moment, which is the engine's own work."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self):
        self.now += 1e-4
        return self.now


class TimedLM(TableLM):
    """A table that takes `fixed + per_row × rows + per_token × context` seconds."""

    clock: Clock
    fixed = per_row = per_token = 0.0

    def score(self, rows):
        logits = sum(row.num_logits for row in rows)
        self.clock.now += self.fixed + self.per_row * logits + self.per_token * max(r.num_tokens for r in rows)
        return super().score(rows)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    made = Clock()
    for room in ("measure.predict.profiling", "engine.engine", "engine.stepper"):
        monkeypatch.setattr(f"specdec_cli.{room}.perf_counter", made)
    return made


def timed_engine(clock, k=4, draft_seconds=0.002):
    def logits(seed):
        def function(context):
            common = np.random.default_rng([7, *context]).normal(0, 2, V)
            return common + np.random.default_rng([seed, *context]).normal(0, 0.6, V)

        return function

    target, draft = (TimedLM(logits(seed), V, order=2, name=f"lm{seed}") for seed in (1, 2))
    target.clock = draft.clock = clock
    target.fixed, target.per_row, target.per_token = 0.02, 0.001, 1e-5
    draft.fixed = draft_seconds
    drafter = create("model", {"model": "draft"})
    drafter.load(Resources(lambda name: draft, None, V))
    return Engine(target, drafter, None, EngineOptions(num_speculative_tokens=k))


def test_a_profile_finds_the_costs_that_were_put_in(clock) -> None:
    engine = timed_engine(clock)
    costs = profile(engine, 5, (16, 64), time_limit_seconds=1e9)
    assert costs.num_repeats == MAX_REPEATS
    assert costs.context_lengths == (16, 64)
    for place, length in enumerate((16, 64)):
        want = [0.02 + 0.001 * rows + 1e-5 * (length + rows - 1) for rows in range(1, 7)]
        assert costs.target_seconds[place] == pytest.approx(want, abs=2e-4)
        assert costs.draft_seconds[place, 1:] == pytest.approx([0.002 * k for k in range(1, 6)], abs=2e-4)
    assert costs.draft_seconds[:, 0] == pytest.approx(0)
    assert costs.draft_seconds_per_token(40) == pytest.approx(0.002, rel=0.05)
    assert (costs.overhead_seconds > 0).all()
    assert (costs.overhead_seconds < 1e-3).all()
    assert float(costs.target(3, 40)) == pytest.approx(0.023 + 42e-5, abs=2e-4)
    assert engine.target.num_free_blocks == engine.target.num_blocks, "the cache is given back"
    assert not engine.has_work
    assert len(not_none(costs.rounds)) == MAX_REPEATS
    assert np.median(not_none(costs.rounds).target, axis=0) == pytest.approx(costs.target_seconds)
    assert np.median(not_none(costs.rounds).overhead, axis=0) == pytest.approx(costs.overhead_seconds, rel=0.2)
    assert not_none(costs.rounds).flat.shape == (MAX_REPEATS, len(costs.flat))
    assert np.median(costs.drawn(), axis=0) == pytest.approx(costs.flat, rel=0.2)


def test_what_verification_does_to_the_next_forward_is_in_the_profile(clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes caches and cores from it, more so when sampling; here a forward behind it takes half as long again."""
    engine, verified = timed_engine(clock), []

    def verify_and_empty_caches(p, rows, starts=()):
        verified.append([(len(row.guesses.drafted), row.guesses.q is not None) for row in rows])
        engine.target.fixed = 0.03
        return verify(p, rows, starts)

    monkeypatch.setattr("specdec_cli.engine.stepper.verify", verify_and_empty_caches)
    costs = profile(engine, 2, (16,), time_limit_seconds=0.0, params=SamplingParams(temperature=1.0), batch_size=2)
    assert costs.target_seconds[0] == pytest.approx([0.03 + 0.002 * rows + 16e-5 for rows in (1, 2, 3)], abs=5e-4)
    assert {(2, True), (1, True), (0, False)} == {one for rows in verified for one in rows}


def test_the_engines_own_work_is_that_of_steps_that_have_settled(clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran before has pushed it out of the caches: the first steps of a kind take longer than those in a row."""
    engine, step, begun = timed_engine(clock), Engine._step, []

    def slow_at_first(self):
        events = step(self)
        first = events[0]
        assert isinstance(first, Stepped)
        if first.num_prefill_tokens:
            begun.clear()
            return events
        begun.append(1)
        return [replace(first, overhead_seconds=9e-4 if len(begun) < 4 else 1e-4), *events[1:]]

    monkeypatch.setattr(Engine, "_step", slow_at_first)
    engine.target.fixed = engine.target.per_row = engine.drafter.lm.fixed = 0.0
    costs = profile(engine, 2, (16,), time_limit_seconds=0.0)
    assert costs.overhead_seconds == pytest.approx([1e-4] * 3)


def test_a_profile_keeps_to_its_time_and_measures_a_few_times_at_least(clock) -> None:
    assert profile(timed_engine(clock), 2, (16,), time_limit_seconds=0.0).num_repeats == MIN_REPEATS
    shares: list[Any] = []
    costs = profile(timed_engine(clock), 2, (16,), time_limit_seconds=3.0, watch=shares.append)
    assert MIN_REPEATS < costs.num_repeats < MAX_REPEATS
    assert costs.seconds < 3.5
    assert shares == sorted(shares)


def test_contexts_that_do_not_fit_are_shortened_or_refused(clock) -> None:
    engine = timed_engine(clock)
    engine.target.max_context = 40
    assert profile(engine, 4, (16, 64, 256), time_limit_seconds=0).context_lengths == (16, 36)
    with pytest.raises(UsageError, match="no room for k"):
        profile(engine, 40, (16,))
    engine.target.num_blocks = 2
    with pytest.raises(UsageError, match="KV cache"):
        profile(engine, 4, (16, 36))


def test_real_steps_keep_to_the_blocks_that_the_contexts_leave(clock) -> None:
    """Contexts of 16 + 4 tokens hold two blocks each; quick steps that accept all would need five for each, too."""
    engine = timed_engine(clock)
    engine.drafter.lm._function = engine.target._function
    engine.target.fixed = engine.target.per_row = engine.drafter.lm.fixed = 0.0
    engine.target.num_blocks = 10
    costs = profile(engine, 4, (16,), time_limit_seconds=0.0, batch_size=2)
    assert (costs.overhead_seconds > 0).all()
    assert engine.target.num_free_blocks == 10


def test_a_curve_that_is_not_monotone_stays_so(clock) -> None:
    engine = timed_engine(clock)
    score = engine.target.score

    def odd(rows):
        if sum(row.num_logits for row in rows) == 3:
            clock.now += 0.05
        return score(rows)

    engine.target.score = odd
    seconds = profile(engine, 4, (16,), time_limit_seconds=0).target_seconds[0]
    assert seconds[2] > seconds[3] + 0.04


def test_predicted_seconds_are_the_engines(clock) -> None:
    """Greedy: the same steps at the same prices, to within the clock's own moments."""
    engine = timed_engine(clock, k=6)
    params = SamplingParams(max_new_tokens=60)
    requests = [Request(PromptRow(i, ""), [i % V, 1, 2], replace(params, index=i)) for i in range(6)]
    trace = trace_target(engine, requests)
    trace.drafts["draft"] = trace_draft(trace, engine.drafter, 6)
    prediction = predict(replay(trace, "draft", k_max=6), profile(engine, 6, (4, 63), time_limit_seconds=0))

    def decode_seconds(request, k):
        seconds = 0.0
        engine.add(request.token_ids, request.params, k)
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, Stepped) and not event.emitted[0].from_prefill:
                    seconds += event.draft_seconds + event.verify_seconds + event.overhead_seconds
        return seconds

    plain = np.array([decode_seconds(request, 0) for request in requests])
    for row in prediction.rows:
        measured = np.array([decode_seconds(request, row.k) for request in requests])
        assert row.seconds == pytest.approx(measured, rel=0.01)
        assert row.plain_seconds == pytest.approx(plain, rel=0.01)
        assert row.speedup.median == pytest.approx(plain.sum() / measured.sum(), rel=0.01)
        assert row.median_speedup.median == pytest.approx(np.median(plain / measured), rel=0.01)
        assert sum(not_none(row.shares()).values()) == pytest.approx(1)
    assert prediction.recommended.k == max(prediction.rows, key=lambda row: row.speedup.median).k


def made_replay(k, survival, num_prompts=8):
    """Full steps only: the formula as PERFORMANCE.md writes it."""
    survival = np.asarray(survival[:k], dtype=float)
    steps = np.linspace(90, 110, num_prompts)
    by = np.zeros((num_prompts, k + 1))
    by[:, k] = steps
    at_least = np.outer(steps, np.ones(k))
    accepted = np.outer(steps, survival)
    exactly = -np.diff(np.concatenate(([1.0], survival, [0.0])))
    return Replay(
        k=k,
        rule="block",
        tasks=(None,) * num_prompts,
        num_steps=steps,
        num_emitted=steps * (1 + survival.sum()),
        drafted_at_least=at_least,
        accepted_at_least=accepted,
        reached=np.outer(steps, np.concatenate(([1.0], survival[:-1]))),
        steps_by_drafted=by,
        steps_by_asked=by,
        histogram=np.outer(steps, exactly),
        mean_context=np.full(num_prompts, 100.0),
        drafts_by_position=np.ones((num_prompts, 4)),
        accepted_by_position=np.ones((num_prompts, 4)),
        first=np.outer(steps, [0.7, 1.0]),
    )


def made_costs(target=(10, 11, 12, 14, 18, 30), draft=2.0, overhead=1.0):
    k = len(target) - 1
    return Costs(
        k_max=k,
        context_lengths=(100,),
        target_seconds=np.array([target], dtype=float) / 1e3,
        draft_seconds=np.array([[draft * i for i in range(k + 1)]]) / 1e3,
        overhead_seconds=np.full(k + 1, overhead / 1e3),
        batch_size=1,
        num_repeats=5,
        seconds=1.0,
        load=ProfileLoad(0, 0, 2),
    )


SURVIVAL = (0.7, 0.55, 0.45, 0.38, 0.33)


def test_the_formula() -> None:
    prediction = predict([made_replay(k, SURVIVAL) for k in range(1, 6)], made_costs())
    verify = (10, 11, 12, 14, 18, 30)
    for row in prediction.rows:
        want = (1 + sum(SURVIVAL[: row.k])) * 11 / (row.k * 2 + verify[row.k] + 1)
        assert row.speedup.median == pytest.approx(want)
    assert prediction.cost_ratio == pytest.approx(2 / 11)
    assert prediction.alpha == pytest.approx(0.7)
    assert prediction.rows[2].iid_speedup == pytest.approx((1 - 0.7**4) / 0.3 / (1 + 3 * 2 / 11))
    best_free = max((1 + sum(SURVIVAL[:k])) * 11 / (verify[k] + 1) for k in range(1, 6))
    assert prediction.ceiling == pytest.approx(best_free)
    assert prediction.chains[0].iid_speedup == pytest.approx(1.7 / (1 + 2 / 11))


def noisy_costs(seed, num_rounds=15, noise=0.06):
    """Costs as a profile finds them, every figure of every round off by some per cent; the truth is `made_costs`."""
    truth, generator = made_costs(), np.random.default_rng(seed)

    def taken(seconds):
        return seconds * np.exp(generator.normal(0, noise, (num_rounds, *seconds.shape)))

    rounds = Rounds(*(taken(one) for one in (truth.target_seconds, truth.draft_seconds, truth.overhead_seconds)))
    medians = [np.median(one, axis=0) for one in (rounds.target, rounds.draft, rounds.overhead)]
    names = ("target_seconds", "draft_seconds", "overhead_seconds")
    return replace(truth, **dict(zip(names, medians, strict=True)), num_repeats=num_rounds, rounds=rounds)


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("figure", ["speedup", "median_speedup"])
def test_intervals_hold_the_truth_although_costs_are_uncertain(figure: str) -> None:
    """All prompts are alike, so that costs alone are uncertain; without their rounds the interval is a point."""
    one = made_replay(4, SURVIVAL, num_prompts=12)
    truth = getattr(predict([one], made_costs()).rows[0], figure).median
    found = [getattr(predict([one], noisy_costs(seed)).rows[0], figure).ci95 for seed in range(60)]
    assert sum(low <= truth <= high for low, high in found) >= 52
    assert np.median([high - low for low, high in found]) < 0.3 * truth
    low, high = getattr(predict([one], replace(noisy_costs(0), rounds=None)).rows[0], figure).ci95
    assert high - low < 1e-9


def test_prompts_and_rounds_are_drawn_together() -> None:
    one = made_replay(4, SURVIVAL, num_prompts=12)
    factor = np.exp(np.random.default_rng(5).normal(0, 0.15, 12))
    one.num_emitted = one.num_emitted * factor
    width = {}
    for name, replayed in (("costs", made_replay(4, SURVIVAL, num_prompts=12)), ("both", one)):
        width[name] = np.diff(not_none(predict([replayed], noisy_costs(3)).rows[0].median_speedup.ci95))[0]
    width["prompts"] = np.diff(
        not_none(predict([one], replace(noisy_costs(3), rounds=None)).rows[0].median_speedup.ci95)
    )[0]
    assert width["both"] > max(width["costs"], width["prompts"])
    assert width["both"] < width["costs"] + width["prompts"]


def test_what_slows_a_whole_round_changes_no_speed_up() -> None:
    costs = noisy_costs(1, noise=0.0)
    slow = np.random.default_rng(2).uniform(1, 3, len(costs.rounds))
    parts = (costs.rounds.target, costs.rounds.draft, costs.rounds.overhead)
    rounds = Rounds(*(part * slow.reshape(-1, *[1] * (part.ndim - 1)) for part in parts))
    low, high = not_none(predict([made_replay(3, SURVIVAL)], replace(costs, rounds=rounds)).rows[0].speedup.ci95)
    assert high - low < 1e-9


def test_few_rounds_are_named() -> None:
    assert "were measured in 5 rounds" in noisy_costs(0, num_rounds=ENOUGH - 1).warning
    assert noisy_costs(0, num_rounds=ENOUGH).warning is None
    assert replace(noisy_costs(0), rounds=None).warning


def test_break_even_and_the_draft_for_twice() -> None:
    costs = made_costs()
    prediction = predict([made_replay(k, SURVIVAL) for k in range(1, 6)], costs)
    steps = {k: (k * 2 + costs.target_seconds[0, k] * 1e3 + 1) / 11 for k in range(1, 6)}
    assert max(iid_length(not_none(prediction.break_even_alpha), k) / steps[k] for k in steps) == pytest.approx(
        1, abs=1e-6
    )
    good = [made_replay(k, (0.9, 0.8, 0.7, 0.6, 0.5)) for k in range(1, 6)]
    again = predict(good, made_costs(draft=not_none(predict(good, costs).draft_seconds_for_2x) * 1e3))
    assert max(row.speedup.median for row in again.rows) == pytest.approx(2)
    poor = predict([made_replay(k, (0.05,) * 5) for k in range(1, 6)], costs)
    assert poor.draft_seconds_for_2x is None, "not even a free draft would do"
    dear = predict([made_replay(k, SURVIVAL) for k in range(1, 6)], made_costs(draft=50))
    assert dear.break_even_alpha is None


def test_the_best_k_and_why() -> None:
    prediction = predict([made_replay(k, SURVIVAL) for k in range(1, 6)], made_costs())
    best = max(prediction.rows, key=lambda row: row.speedup.median)
    assert prediction.recommended.k == best.k
    assert f"k = {best.k}" in prediction.recommended.why
    dear = predict([made_replay(k, SURVIVAL) for k in range(1, 6)], made_costs(draft=30)).recommended
    assert (dear.k, dear.speedup) == (0, None)
    assert "draft takes" in dear.why
    poor = predict([made_replay(k, (0.05, 0.02, 0, 0, 0)) for k in range(1, 6)], made_costs(draft=0.1)).recommended
    assert poor.k == 0
    assert "accepts only" in poor.why
    rows = predict(
        [made_replay(k, (1.0,) * 5) for k in range(1, 6)], made_costs((1, 9, 19, 29, 39, 49), 0.1)
    ).recommended
    assert rows.k == 0
    assert "verifying" in rows.why


def test_a_gain_that_is_not_sure_is_no_recommendation() -> None:
    row = predict([made_replay(2, SURVIVAL)], made_costs()).rows[0]
    unsure = replace(row, speedup=replace(row.speedup, median=1.02, ci95=(0.97, 1.1)))
    assert choose([unsure]).k == 0
    assert "not certainly" in choose([unsure]).why
    assert choose([replace(row, speedup=replace(row.speedup, median=1.02, ci95=(1.01, 1.1)))]).k == 2
    few = choose([replace(row, speedup=replace(row.speedup, median=1.2, ci95=None, pairs=3))])
    assert few.k == 0
    assert "not certainly above 1 (3 prompts are too few to be certain)" in few.why


def test_costs_as_json_have_the_contracts_keys() -> None:
    document = costs_result(made_costs()).as_json()
    assert {"target_seconds_by_rows", "draft_seconds_per_token", "overhead_seconds"} <= set(document)
    assert document["target_seconds_by_rows"] == pytest.approx([0.010, 0.011, 0.012, 0.014, 0.018, 0.030])
    assert document["draft_seconds_per_token"] == pytest.approx(0.002)


def test_outputs_of_one_token_have_nothing_to_speed_up(clock) -> None:
    engine = timed_engine(clock)
    params = SamplingParams(max_new_tokens=1)
    trace = trace_target(engine, [Request(PromptRow(i, ""), [i, 1], replace(params, index=i)) for i in range(3)])
    trace.drafts["draft"] = trace_draft(trace, engine.drafter, 2)
    prediction = predict(replay(trace, "draft", k_max=2), profile(engine, 2, (4,), time_limit_seconds=0))
    assert prediction.recommended.k == 0
    assert "nothing" in prediction.recommended.why
    assert prediction.alpha is None
    assert as_json(prediction.rows[0].speedup)["median"] is None


def test_a_draft_that_never_guesses_costs_what_asking_costs(clock) -> None:
    engine = timed_engine(clock)
    drafter = create("none", {})
    plain = Engine(engine.target, drafter, None, EngineOptions(num_speculative_tokens=2))
    trace = trace_target(plain, [Request(PromptRow(i, ""), [i, 1], SamplingParams(max_new_tokens=9)) for i in range(3)])
    trace.drafts["none"] = trace_draft(trace, drafter, 2)
    prediction = predict(replay(trace, "none", k_max=2), profile(plain, 2, (8,), time_limit_seconds=0))
    assert prediction.rows[1].speedup.median == pytest.approx(1, abs=0.03)
    assert prediction.recommended.k == 0


def test_a_warm_pair_is_profiled_without_a_round_to_warm_up(clock) -> None:
    cold = profile(timed_engine(clock), 2, (16,), time_limit_seconds=0.0, repeats=(1, 1))
    begin = clock.now
    warm = profile(timed_engine(clock), 2, (16,), repeats=(1, 1), is_warm=True, overhead_seconds=cold.overhead_seconds)
    assert warm.target_seconds == pytest.approx(cold.target_seconds, rel=0.02)
    assert np.array_equal(warm.overhead_seconds, cold.overhead_seconds)
    assert clock.now - begin < 0.6 * cold.seconds
    assert warm.num_repeats == len(not_none(warm.rounds)) == 1
    assert profile(timed_engine(clock), 2, (16,), time_limit_seconds=99.0, repeats=(1, 5)).num_repeats == 5


@pytest.mark.parametrize("is_always", [False, True])
def test_an_interrupted_visit_is_made_again(clock, monkeypatch: pytest.MonkeyPatch, is_always: bool) -> None:
    """Every fourth look at the machine's use, or every one, finds that most of the time went to others."""
    from specdec_cli.measure.machine import interruption
    from specdec_cli.measure.machine.interruption import Usage

    looks, waited, disturbed = [0], [0.0], []
    engine = timed_engine(clock)
    step = engine.target.score

    def score(rows):
        if disturbed:
            clock.now += 1.0
        return step(rows)

    before = clock.now

    def look() -> Usage:
        nonlocal before
        looks[0] += 1
        if looks[0] % 2:  # before a visit
            disturbed[:] = [1] if is_always or looks[0] % 8 == 1 else []
        elif disturbed:
            waited[0] += 0.9 * (clock.now - before)
            disturbed.clear()
        before = clock.now
        return Usage(clock.now, clock.now, waited[0], 0)

    monkeypatch.setattr(engine.target, "score", score)
    monkeypatch.setattr(interruption, "look_at_usage", look)
    costs = profile(engine, 2, (16,), time_limit_seconds=0.0)
    num_visits = looks[0] // 2
    least = (MIN_REPEATS + 1) * 3
    assert least < num_visits <= 1.5 * least + 1
    assert (costs.target_seconds.max() < 0.1) is not is_always


def test_trees_are_profiled_beside_chains(clock) -> None:
    engine, trees = timed_engine(clock), tuple(map(TreeShape.parse, ("2,1,1", "3", "3,2+1")))
    costs = profile(engine, 3, (16, 64), time_limit_seconds=0.0, trees=trees, batch_size=2)
    assert costs.trees == trees
    assert costs.target_seconds.shape == costs.draft_seconds.shape == (2, 4 + 3)
    for column, (nodes, depth) in enumerate([(1, 1), (2, 2), (3, 3), (6, 3), (3, 1), (6, 2)], 1):
        want = [0.02 + 0.001 * 2 * (nodes + 1) + 1e-5 * length for length in (16, 64)]
        assert costs.target_seconds[:, column] == pytest.approx(want, abs=2e-4)
        assert costs.draft_seconds[:, column] == pytest.approx(0.002 * depth, abs=2e-4)
    assert list(costs_result(costs).by_tree) == ["2,1,1", "3", "3,2+1"]
    assert len(costs_result(costs).target_seconds_by_rows) == 4
    assert engine.target.num_free_blocks == engine.target.num_blocks, "the cache is given back"


def test_a_trees_speedup_is_that_of_its_steps() -> None:
    """Each step verifies the tree's rows and makes its passes; here all are whole."""
    probes, base = probe_trees(3), made_costs(target=(10, 11, 12, 14))
    passes = {1: 2.0, 2: 2.5, 5: 4.0, 10: 6.5, 21: 12.0}  # milliseconds of the draft model by rows
    nodes = {3: 14, 6: 17, 15: 26, 30: 41, 63: 74}  # and of the target by drafted nodes
    draft = [passes[1] + 2 * passes[rows] for rows in passes]
    costs = replace(
        base,
        target_seconds=np.concatenate([base.target_seconds, np.array([list(nodes.values())]) / 1e3], axis=1),
        draft_seconds=np.concatenate([base.draft_seconds, np.array([draft]) / 1e3], axis=1),
        overhead_seconds=np.full(4 + len(probes), 1e-3),
        trees=probes,
    )
    trees = [TreeShape.parse(one) for one in ("3,2+1", "5,3+1+1+0+0,2+1", "5,1,1")]
    chains = [made_replay(k, SURVIVAL) for k in range(1, 4)]
    found = predict(chains, costs, {tree: made_replay(tree.depth, SURVIVAL) for tree in trees})
    assert [str(row.shape) for row in found.trees] == [f"tree {tree}" for tree in trees]
    assert [row.k for row in found.chains] == [1, 2, 3]
    for row, drafted, verified in zip(found.trees, (2 + 2.5, 2 + 3.0 + 2.5, 2 + 4 + 4), (17, 24, 26), strict=True):
        tokens = 1 + sum(SURVIVAL[: row.k])
        assert row.speedup.median == pytest.approx(tokens * 11 / (drafted + verified + 1))
        assert row.tokens_per_second == pytest.approx(tokens / (drafted + verified + 1) * 1e3)
        assert row.iid_speedup is None
    search = TreeCosts.of(costs, 100.0)
    assert [search.step(tree) for tree in trees] == pytest.approx([0.0225, 0.0325, 0.037])
    assert search.step(None) == pytest.approx(0.011)
