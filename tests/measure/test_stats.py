import numpy as np
import pytest

from specdec_cli.measure.stats import (
    Interval,
    bootstrap_median,
    bootstrap_totals,
    interleaved,
    paired,
    ratio_of_totals,
)


def test_a_seed_gives_one_interval():
    values = np.random.default_rng(0).normal(2, 1, 50)
    assert bootstrap_median(values) == bootstrap_median(values)
    assert bootstrap_median(values) != bootstrap_median(values, seed=1)
    assert bootstrap_median(values).median == np.median(values)


def test_one_pair_has_no_interval():
    one = bootstrap_median(np.array([1.5]))
    assert one == Interval(1.5, None, 1)
    assert one.as_dict() == {"median": 1.5, "ci95": None, "pairs": 1}
    assert not one.is_above(1.0)
    assert not one.is_below(2.0)
    assert ratio_of_totals(np.array([3.0]), np.array([2.0])) == Interval(1.5, None, 1)


def test_a_ratio_with_nothing_under_it_is_null():
    found = ratio_of_totals(np.zeros(3), np.zeros(3))
    assert found.as_dict() == {"median": None, "ci95": None, "pairs": 3}


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(5)
    covered = {"median": 0, "ratio": 0}
    for _ in range(200):
        b = rng.gamma(4, 1, 60)
        a = 1.7 * b + rng.normal(0, 0.5, 60)
        low, high = ratio_of_totals(a, b).ci95
        covered["ratio"] += low <= 1.7 <= high
        low, high = bootstrap_median(rng.normal(3, 1, 60), num_resamples=500).ci95
        covered["median"] += low <= 3 <= high
    assert all(180 <= count <= 199 for count in covered.values()), covered


def test_ratio_of_totals_weighs_prompts_by_their_size():
    a, b = np.array([10.0, 1.0]), np.array([5.0, 1.0])
    assert ratio_of_totals(a, b).median == pytest.approx(11 / 6)


def test_totals_of_any_statistic():
    by_prompt = np.arange(12.0).reshape(4, 3)
    found = bootstrap_totals(lambda t: t[:, 0] - t[:, 2], by_prompt)
    assert found.median == -8
    assert found.ci95 == (-8, -8), "the difference is the same in every prompt"


def test_paired_sees_what_unpaired_does_not():
    rng = np.random.default_rng(1)
    speed = rng.lognormal(0, 1, 30)
    a, b = speed * rng.normal(1.05, 0.01, 30), speed
    found = paired(a, b)
    assert found.is_significant
    assert found.p_a_faster == 1
    assert found.ratio.median == pytest.approx(1.05, abs=0.01)
    assert bootstrap_median(a).overlaps(bootstrap_median(b))
    assert paired(b, a).p_a_faster == 0
    assert paired(a, a).p_a_faster == 0.5


def test_interleaved_runs_take_each_pairs_median():
    a = np.array([[1.0, 1.1, 9.0], [2.0, 2.1, 2.2]])
    found = interleaved(a, 2 * a)
    assert found.ratio.median == pytest.approx(2)


def test_blocks_of_resamples_are_the_whole(monkeypatch):
    values = np.random.default_rng(0).normal(2, 1, 40)
    whole = bootstrap_median(values)
    monkeypatch.setattr("specdec_cli.measure.stats._BLOCK", 40 * 300)
    assert bootstrap_median(values).ci95 == pytest.approx(whole.ci95)
