import numpy as np
import pytest
from typed import not_none

from specdec_cli.document import Interval, as_json
from specdec_cli.measure.stats import (
    MIN_PAIRS,
    bootstrap_median,
    bootstrap_pooled_median,
    bootstrap_totals,
    joint_median,
    lacks_interval,
    paired,
    ratio_of_totals,
)


def test_the_same_values_give_the_same_interval() -> None:
    values = np.random.default_rng(0).normal(2, 1, 50)
    assert bootstrap_median(values) == bootstrap_median(values)
    assert bootstrap_median(values).median == np.median(values)


def test_too_few_pairs_have_no_interval() -> None:
    one = bootstrap_median(np.array([1.5]))
    assert one == Interval(1.5, None, 1)
    assert as_json(one) == {"median": 1.5, "ci95": None, "pairs": 1}
    assert not one.is_above(1.0)
    assert not one.is_below(2.0)
    assert ratio_of_totals(np.array([3.0]), np.array([2.0])) == Interval(1.5, None, 1)
    for num, is_known in ((MIN_PAIRS - 1, False), (MIN_PAIRS, True)):
        values = np.arange(2.0, 2 + num)
        pair = paired(values, np.ones(num))
        found = [
            bootstrap_median(values),
            ratio_of_totals(values, np.ones(num)),
            bootstrap_pooled_median(list(values[:, None])),
            joint_median(values, np.tile(values, (9, 1))),
            pair.ratio,
        ]
        assert [one.is_above(1.0) for one in found] == [one.ci95 is not None for one in found] == [is_known] * 5
        assert pair.is_significant is is_known
        assert (pair.p_a_faster is None) is not is_known


def test_of_few_prompts_a_pooled_median_lies_in_the_range_of_theirs() -> None:
    groups = [np.array([1.0, 2.0, 9.0]), np.array([4.0]), np.array([3.0, 3.0])]
    assert bootstrap_pooled_median(groups) == Interval(3.0, (2.0, 4.0), 3)


def test_an_unknown_interval_may_share_a_value_with_any() -> None:
    known, far = (Interval(at, (at, at), 9) for at in (1.0, 7.0))
    assert not known.overlaps(far)
    assert known.overlaps(Interval(7.0, None, 3))
    assert Interval(7.0, None, 3).overlaps(known)


def test_a_few_pairs_cover_the_median_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bootstrap's own interval of seven values covers it 85 times of 100."""
    monkeypatch.setattr("specdec_cli.measure.stats.NUM_RESAMPLES", 400)
    rng = np.random.default_rng(3)
    for num in (6, 7, 8, 10):
        intervals = [bootstrap_median(rng.normal(0, 1, num)).ci95 for _ in range(300)]
        assert sum(low <= 0 <= high for low, high in map(not_none, intervals)) >= 0.92 * 300, num


def test_a_figure_without_its_interval_is_found_in_a_document() -> None:
    bare, nothing = {"median": 1.5, "ci95": None, "pairs": 3}, {"median": None, "ci95": None, "pairs": 0}
    known = {"median": 1.5, "ci95": [1.0, 2.0], "pairs": 9}
    assert lacks_interval({"by_task": {"code": {"speedup": {"decode": bare}}}})
    assert lacks_interval({"pairwise": [{"speedup_ratio": 1.2, "ci95": None}]})
    assert not lacks_interval({"speedup": {"decode": known, "latency": nothing}, "rows": [{"measured": None}]})


def test_a_ratio_with_nothing_under_it_is_null() -> None:
    found = ratio_of_totals(np.zeros(3), np.zeros(3))
    assert as_json(found) == {"median": None, "ci95": None, "pairs": 3}


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(5)
    covered = {"median": 0, "ratio": 0}
    for _ in range(200):
        b = rng.gamma(4, 1, 60)
        a = 1.7 * b + rng.normal(0, 0.5, 60)
        low, high = not_none(ratio_of_totals(a, b).ci95)
        covered["ratio"] += low <= 1.7 <= high
        low, high = not_none(bootstrap_median(rng.normal(3, 1, 60)).ci95)
        covered["median"] += low <= 3 <= high
    assert all(180 <= count <= 199 for count in covered.values()), covered


def test_ratio_of_totals_weighs_prompts_by_their_size() -> None:
    a, b = np.array([10.0, 1.0]), np.array([5.0, 1.0])
    assert ratio_of_totals(a, b).median == pytest.approx(11 / 6)


def test_totals_of_any_statistic() -> None:
    by_prompt = np.arange(18.0).reshape(6, 3)
    found = bootstrap_totals(lambda t: t[:, 0] - t[:, 2], by_prompt)
    assert found.median == -12
    assert found.ci95 == (-12, -12), "the difference is the same in every prompt"


def test_paired_sees_what_unpaired_does_not() -> None:
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


def test_blocks_of_resamples_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(2, 1, 40)
    whole = bootstrap_median(values)
    monkeypatch.setattr("specdec_cli.measure.stats._BLOCK", 40 * 300)
    assert bootstrap_median(values).ci95 == pytest.approx(whole.ci95)
