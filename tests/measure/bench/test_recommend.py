"""What a sweep recommends: firm advice only from evidence that agrees, else inconclusive and what would settle it."""

import math
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from toy_engine import LetterTokenizer, toy_engine
from typed import not_none, stand_in

from specdec_cli.document import Interval
from specdec_cli.draft_shape import DraftShape
from specdec_cli.engine.arms import ArmRun, EngineArm
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.measure.bench.recommend import Case
from specdec_cli.measure.bench.sweep import Sweep
from specdec_cli.measure.machine.load import Load
from specdec_cli.measure.predict.evidence import Evidence, Recommendation, needs, side
from specdec_cli.measure.workload.workload import tokenize
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.timing import Timing
from specdec_cli.tree_shape import TreeShape


def interval(median: float, low: float | None = None, high: float | None = None, pairs: int = 24) -> Interval:
    return Interval(median, None if low is None or high is None else (low, high), pairs)


ISSUE = interval(0.46, 0.43, 1.70, 2), interval(2.97, 1.92, 4.99)


@pytest.mark.parametrize(
    ("measured", "predicted", "pays", "is_contradictory"),
    [
        (*ISSUE, None, True),
        (interval(2.0, 1.8, 2.2), interval(2.1, 1.9, 2.3), True, False),
        (interval(2.0, 1.8, 2.2), None, True, False),
        (interval(0.8, 0.7, 0.9), None, False, False),
        (interval(0.8, 0.7, 0.9), interval(1.5, 1.4, 1.6), None, True),
        (interval(1.5, 1.4, 1.6), interval(0.8, 0.7, 0.9), None, True),
        (interval(1.5, 1.1, 1.7), interval(2.97, 1.92, 4.99), None, True),  # further apart than a profile ever was
        (interval(2.0, 1.9, 2.1), interval(2.2, 2.15, 2.3), True, False),  # apart, but the answer is the same
        (interval(1.2, 1.1, 1.3), interval(0.9, 0.8, 1.05), True, False),  # the prediction leaves it open
        (interval(1.01, 0.99, 1.019), None, False, False),  # two per cent are no gain
        (interval(1.0, 0.9, 1.1), None, None, False),
        (interval(1.5, 1.4, 1.6, pairs=2), None, None, False),
        (interval(1.5, 1.4, 1.6, pairs=2), interval(1.5, 1.3, 1.7), True, False),
        (interval(1.5, 1.4, 1.6, pairs=5), interval(1.5, 0.9, 1.7), None, False),
        (interval(0.5, 0.4, 0.6, pairs=5), interval(0.5, 0.3, 0.7), False, False),
        (interval(1.5, pairs=1), interval(1.5, 1.3, 1.7), None, False),
        (interval(0.7, pairs=1), interval(1.5, 1.3, 1.7), None, True),
        (interval(1.5, pairs=1), interval(0.7, 0.6, 0.8), None, True),
        (interval(0.7, pairs=1), interval(0.7, 0.6, 0.8), None, False),
        (interval(1.5, pairs=1), None, None, False),
        (interval(1.5, pairs=1), interval(1.5, pairs=1), None, False),
        (None, interval(1.5, 1.3, 1.7), True, False),
        (None, interval(float("nan")), None, False),
    ],
)
def test_whether_a_draft_pays(measured, predicted, pays, is_contradictory) -> None:
    found = Evidence(measured, predicted)
    assert (found.pays, found.is_contradictory) == (pays, is_contradictory)
    if measured is not None:
        assert bool(needs(found, None)) is (pays is None or found.is_of_few)


def test_a_batch_is_predicted_approximately() -> None:
    far = Evidence(interval(1.5, 1.4, 1.6), interval(2.5, 2.4, 2.6), math.inf)
    assert far.pays
    assert Evidence(interval(1.5, 1.4, 1.6), interval(0.8, 0.7, 0.9), math.inf).is_contradictory


def test_an_interval_that_does_not_exist_says_nothing() -> None:
    assert side(None) is side(interval(1.5)) is side(interval(1.0, float("nan"), float("nan"))) is None


def prediction(by_k, recommended=None):
    best = max(by_k, key=lambda k: by_k[k].median)
    found = recommended or Recommendation(best, None, by_k[best], f"k = {best} is predicted best", "speculate")
    rows = {DraftShape(k): SimpleNamespace(speedup=speedup) for k, speedup in by_k.items()}
    return SimpleNamespace(recommended=found, rows=list(rows.values()), trees=[], row=rows.get)


def swept(monkeypatch: pytest.MonkeyPatch, speedups_by_k, num_prompts=24, predicted=None, **more) -> Sweep:
    """A sweep that measured these speed-ups, prompt after prompt, at every k; run to its end."""
    rows = [PromptRow(i, "ab ab") for i in range(num_prompts)]
    encode = LetterTokenizer().encode
    work = tokenize(rows, "mine", lambda row: encode(row.prompt), SamplingParams(max_new_tokens=4), 512)

    def run(arm, requests, stopped):
        speedups = speedups_by_k.get(arm.num_speculative_tokens, [1.0])
        seconds = 1 / speedups[requests[0].row.index % len(speedups)]
        return None if stopped() else ArmRun(((1,) * 4,), Timing(0.0, seconds, seconds, None), 1)

    monkeypatch.setattr(EngineArm, "run", run)
    made = Sweep(
        engine=toy_engine(),
        workload=work,
        costs=stand_in(None),
        prediction=None,
        k_max=max(speedups_by_k),
        is_exhaustive=True,
        in_use=DraftShape(5),
        **more,
    )
    made.prediction = predicted
    list(made.run())
    return made


def test_point_3_contradictory_evidence_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load 6.5: k = 3 predicted 2.97 (1.92 to 4.99) and measured 0.46 (0.43 to 1.70) in two pairs."""
    predicted = prediction({k: interval(2.97, 1.92, 4.99) for k in (1, 2, 3)})
    found = swept(monkeypatch, {1: [0.2], 2: [0.2], 3: [0.43, 1.70]}, 2, predicted).recommended()
    assert (found.verdict, found.k) == ("inconclusive", 5), "the recipe's k stays"
    assert found.why == (
        "prediction and measurement exclude each other: k = 3 was predicted 2.97× (1.92 to 4.99) and measured "
        "1.06× (0.43 to 1.70) as fast as no draft, from 2 pairs"
    )
    assert found.needs == (
        "a quiet machine", "more repeats (--repeats), until prediction and measurement agree",
        "6 prompts or more (--num-prompts)",
    )  # fmt: skip
    assert not_none(found.speedup).ci95 == (0.43, 4.99), "all that the evidence leaves open"
    busy = swept(monkeypatch, {3: [0.43, 1.70]}, 2, predicted, load=Load(6.5, 2)).recommended()
    assert busy.verdict == "inconclusive"
    assert busy.needs == found.needs
    assert busy.why.startswith(f"{found.why}; the machine was busy: load 6.5 on 2 cores before")


def test_evidence_that_agrees_is_firm(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = prediction({1: interval(1.3, 1.2, 1.4), 2: ISSUE[1]})
    fast = swept(monkeypatch, {1: [1.3], 2: [1.5, 1.6]}, predicted=odd)
    assert fast.recommended().verdict == "inconclusive", "of the faster k 1.6 and 1.92 exclude each other"
    fast.prediction = prediction({1: interval(1.3, 1.2, 1.4), 2: interval(1.5, 1.4, 1.7)})
    found = fast.recommended()
    assert (found.k, found.verdict, found.needs) == (2, "speculate", ())
    slow = swept(monkeypatch, {1: [0.9], 2: [0.8]}).recommended()
    assert (slow.k, slow.verdict, slow.speedup, slow.needs) == (0, "do-not-speculate", None, ())
    assert slow.why.startswith("do not speculate: even the best k = 1 decodes 0.90× (0.90 to 0.90) as fast")


def test_an_interval_that_holds_both_answers_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    found = swept(monkeypatch, {1: [0.5], 2: [0.8, 1.3]}).recommended()
    assert (found.k, found.verdict) == (5, "inconclusive")
    assert found.why.startswith("the interval contains both answers: k = 2 was measured 1.05× (0.80 to 1.30)")
    assert found.needs == ("more prompts (--num-prompts) or repeats (--repeats)",)


def test_one_k_that_surely_pays_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    found = swept(monkeypatch, {1: [1.2], 2: [0.8, 2.0]}).recommended()
    assert (found.k, found.verdict) == (1, "speculate")


def test_a_contradiction_on_a_slower_k_is_none_of_the_recommended_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = prediction({1: interval(1.0, 0.9, 1.05), 2: interval(2.0, 1.9, 2.1)})
    found = swept(monkeypatch, {1: [1.3], 2: [2.0]}, predicted=predicted).recommended()
    assert (found.k, found.verdict) == (2, "speculate")


def test_one_k_that_may_pay_forbids_a_firm_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its median is below the other's, its interval is not."""
    found = swept(monkeypatch, {1: [0.95], 2: [0.7, 0.7, 1.5]}).recommended()
    assert found.verdict == "inconclusive"
    assert "k = 2 was measured 0.70×" in found.why


@pytest.mark.parametrize("speedup", [2.0, 0.5])
def test_a_busy_machine_is_inconclusive_whatever_it_measured(monkeypatch: pytest.MonkeyPatch, speedup: float) -> None:
    found = swept(monkeypatch, {1: [speedup]}, load=Load(9.0, 2)).recommended()
    assert (found.k, found.verdict) == (5, "inconclusive")
    assert found.why.startswith("the machine was busy: load 9.0 on 2 cores before; ")
    assert f"; k = 1 was measured {speedup:.2f}×" in found.why
    assert len(found.needs) == 1


def test_interrupted_passes_make_it_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_cli.measure.machine import interruption
    from specdec_cli.measure.machine.interruption import Usage

    seconds = count()
    monkeypatch.setattr(interruption, "look_at_usage", lambda: Usage(now := next(seconds), now, 0.6 * now, 0))
    found = swept(monkeypatch, {1: [2.0]}).recommended()
    assert found.verdict == "inconclusive"
    assert found.why.startswith("the machine was busy: 48 of 48 passes lost more than 5 % of their time to other")
    assert found.needs == ("a quiet machine",)


def test_a_run_that_ended_before_anything_was_measured_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    found = swept(monkeypatch, {1: [2.0]})
    found.prediction = prediction({1: interval(2.0, 1.9, 2.1)})
    monkeypatch.setattr(Sweep, "measured", lambda _: {})
    assert found.recommended().verdict == "inconclusive"
    assert found.recommended().why == "nothing was measured; predicted: k = 1 is predicted best"
    assert found.recommended().needs == ("a run to its end, which measures",)


def test_six_pairs_of_a_batch_are_six_batches() -> None:
    assert needs(Evidence(interval(1.5, 1.4, 1.6, pairs=3)), None, 8) == ("48 prompts or more (--num-prompts)",)


def test_the_tree_in_use_stays_while_the_case_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    found = swept(monkeypatch, {1: [0.5], 2: [0.8, 1.3]})
    found.in_use = DraftShape.of(TreeShape.parse("3,2+1"))
    recommended = found.recommended()
    assert (recommended.verdict, recommended.k, str(recommended.tree)) == ("inconclusive", 2, "3,2+1")


@pytest.mark.parametrize(
    ("chain", "tree", "best", "said"),
    [
        (2.0, 0.8, "k = 2", "; no tree pays: the best (3,1) decodes 0.80× (0.80 to 0.80) as fast; within"),
        (2.0, 1.5, "k = 2", "; the best tree (3,1) decodes 1.50× (1.50 to 1.50) as fast; within"),
        (1.5, 2.0, "tree 3,1", "; the best chain (k = 2) decodes 1.50× (1.50 to 1.50) as fast"),
        (0.9, 2.0, "tree 3,1", "; no chain pays: the best (k = 2) decodes 0.90× (0.90 to 0.90) as fast"),
        (2.0, 2.0, "k = 2", "; its interval overlaps that of tree 3,1; the best tree (3,1) decodes 2.00×"),
        (0.7, 0.8, "do not speculate: even the best tree 3,1", "decodes 0.80× (0.80 to 0.80) as fast"),
    ],
)
def test_a_chain_and_a_tree_are_told_beside_each_other(chain: float, tree: float, best: str, said: str) -> None:
    speedups = {DraftShape(2): chain, DraftShape.of(TreeShape.parse("3,1")): tree}
    evidence = {shape: Evidence(interval(value, value, value)) for shape, value in speedups.items()}
    study: Any = SimpleNamespace(prediction=None, in_use=DraftShape(0), batch_size=1, step_split=lambda _: None)
    found = Case(study, evidence, None).recommend()
    assert found.why.startswith(best)
    assert said in found.why
    assert (found.tree is not None) is best.startswith("tree")
