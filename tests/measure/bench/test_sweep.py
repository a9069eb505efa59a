"""The sweep over k: which candidates are measured, and when measuring is at its end."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from toy_engine import LetterTokenizer, toy_engine
from typed import not_none, stand_in

from specdec_cli.document import Interval
from specdec_cli.draft_shape import DraftShape
from specdec_cli.engine.arms import ArmRun, EngineArm
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.measure.bench.sweep import MAX_CANDIDATES, Sweep, _is_looked_at, candidates
from specdec_cli.measure.predict.evidence import Recommendation
from specdec_cli.measure.workload.workload import tokenize
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.timing import Timing

NUM_PROMPTS = 12


def sweep(monkeypatch: pytest.MonkeyPatch, seconds_by_k, noise=0.0, **more) -> Sweep:
    """A sweep whose passes take known seconds; `noise` goes up and down by pass."""
    rows = [PromptRow(i, "ab ab") for i in range(NUM_PROMPTS)]
    encode = LetterTokenizer().encode
    work = tokenize(rows, "mine", lambda row: encode(row.prompt), SamplingParams(max_new_tokens=4), 512)
    passes = count()

    def run(arm, requests, stopped):
        factor = np.exp(noise * np.sin(7.0 * next(passes)))
        seconds = seconds_by_k[arm.num_speculative_tokens] * factor
        return ArmRun(((1,) * 4,), Timing(0.0, seconds, seconds, None), 1)

    monkeypatch.setattr(EngineArm, "run", run)
    known = {"engine": toy_engine(), "workload": work, "costs": stand_in(None), "prediction": None}
    made = Sweep(**known, k_max=max(seconds_by_k), is_exhaustive=True, repeats=2)
    made.is_exhaustive = more.get("is_exhaustive", False)
    return made


def num_passes(one: Sweep) -> int:
    list(one.run())
    return len(not_none(one.bench).plain.passes)


def test_measuring_ends_when_the_choice_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sweep(monkeypatch, {0: 2.0, 1: 1.5, 2: 1.0})
    assert num_passes(one) == one.settled_after == 8
    assert one.recommended().k == 2


def test_it_is_asked_seldom_whether_the_choice_is_known() -> None:
    assert [num for num in range(70) if _is_looked_at(num)] == [8, 16, 32, 64]


def test_prompts_that_end_at_once_leave_the_choice_open(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sweep(monkeypatch, {0: 2.0, 1: 1.5, 2: 1.0})
    monkeypatch.setattr(Sweep, "measured", lambda _: {})
    assert num_passes(one) == 2 * NUM_PROMPTS


def test_as_good_as_equal_candidates_end_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sweep(monkeypatch, {0: 2.0, 1: 1.01, 2: 1.0}, noise=0.001)
    assert num_passes(one) == 8
    assert one.recommended().k == 2


@pytest.mark.parametrize("seconds", [{0: 2.0, 1: 1.0, 2: 1.0}, {0: 1.0, 1: 1.0, 2: 1.5}])
def test_noise_leaves_the_choice_open_and_everything_is_measured(monkeypatch: pytest.MonkeyPatch, seconds) -> None:
    one = sweep(monkeypatch, seconds, noise=0.3)
    assert num_passes(one) == 2 * NUM_PROMPTS
    assert one.settled_after is None


def test_exhaustive_measures_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sweep(monkeypatch, {0: 2.0, 1: 1.5, 2: 1.0}, is_exhaustive=True)
    assert num_passes(one) == 2 * NUM_PROMPTS
    assert one.settled_after is None


def test_never_more_candidates_than_the_limit() -> None:
    assert candidates([]) == []
    assert MAX_CANDIDATES >= 2, "one candidate alone could not be told from its neighbours"


def test_too_few_pairs_recommend_nothing_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sweep(monkeypatch, {0: 2.0, 1: 1.5, 2: 1.0})
    one.repeats = not_none(one.bench).repeats = 1
    not_none(one.bench).workload = replace(one.workload, requests=one.workload.requests[:1])
    list(one.run())
    assert one.measured()[DraftShape(2)].speedup == Interval(2.0, None, 1)
    assert one.recommended().k == 0
    assert one.recommended().why.startswith("too few pairs to be certain: k = 2 was measured 2.00× as fast as no draft")
    predicted = Recommendation(1, None, Interval(1.4, (1.2, 1.6), 24), "k = 1 gives the most", "speculate")
    one.prediction = stand_in(
        SimpleNamespace(
            recommended=predicted, rows=[], trees=[], row=lambda _: SimpleNamespace(speedup=predicted.speedup)
        )
    )
    found = one.recommended()
    assert (found.verdict, found.needs) == ("inconclusive", ("6 prompts or more (--num-prompts)",))
    assert not_none(found.speedup).ci95 == (1.2, 2.0), "all that is known"


def test_a_prediction_is_not_taken_against_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sweep(monkeypatch, {0: 1.0, 1: 1.5, 2: 2.0})
    not_none(one.bench).workload = replace(one.workload, requests=one.workload.requests[:1])
    list(one.run())
    predicted = Recommendation(1, None, Interval(1.4, (1.2, 1.6), 24), "k = 1", "speculate")
    one.prediction = stand_in(
        SimpleNamespace(
            recommended=predicted, rows=[], trees=[], row=lambda _: SimpleNamespace(speedup=predicted.speedup)
        )
    )
    assert one.recommended().verdict == "inconclusive"
