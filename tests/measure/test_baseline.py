"""A baseline: what is one, how much may be lost against it, and what makes it unlike."""

import json
import math
from pathlib import Path

import pytest
from typed import not_none

from specdec_cli.errors import UsageError
from specdec_cli.measure.baseline import (
    against_baseline,
    judge_document,
    other_circumstances,
    other_recipe,
    read_baseline,
)
from specdec_cli.recipe.schema import Gates, Recipe
from specdec_cli.report.html import html
from specdec_cli.report.result_files import junit, markdown


def document(median=1.3, ci95=(1.1, 1.5)):
    interval = {"median": median, "ci95": None if ci95 is None else list(ci95), "pairs": 9}
    return {"schema": "specdec.bench/1", "speedup": {"decode": interval, "latency": interval}, "efficiency": 0.5}


def test_a_regression_is_judged_on_the_ratio_of_both_intervals() -> None:
    old = document(1.5, (1.45, 1.55))
    same, slightly, much = document(1.48, (1.4, 1.56)), document(1.4, (1.35, 1.45)), document(1.2, (1.15, 1.25))
    results = [[one.passed for one in against_baseline(new, old, "5%")] for new in (same, slightly, much)]
    assert results == [[True, True], [True, True], [False, False]]
    judged = against_baseline(much, old, "5%")[0]
    assert judged.value == pytest.approx(0.8)
    assert not_none(judged.ci95)[1] == pytest.approx(
        0.8 * math.exp(math.hypot(math.log(1.25 / 1.2), math.log(1.5 / 1.45)))
    )
    for new, said in ((document(None, None), "nothing was measured"), (document(1.3, None), "no interval to compare")):
        found = against_baseline(new, old, "5%")
        assert [one.passed for one in found] == [False, False]
        assert all(said in one.reason for one in found)


def test_a_baseline_must_be_one(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(document()))
    assert read_baseline(str(path), "specdec.bench/1")["efficiency"] == 0.5
    for text, said in (
        ("{", "not JSON"),
        ('{"schema": "x"}', "no `specdec.bench/1`"),
        (json.dumps(document(1.0, None)), "no interval"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            read_baseline(str(path), "specdec.bench/1")
    with pytest.raises(UsageError, match="cannot be read"):
        read_baseline(str(tmp_path / "none.json"), "specdec.bench/1")


def test_an_unlike_baseline_is_said() -> None:
    new, old = ({"recipe": {"target": {"model": name}, "workload": {}, "sampling": {}}} for name in "ab")
    assert other_recipe(new, old) == "the baseline is of another target: the two are not comparable"
    assert other_recipe(new, new) is None


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("command", ["bench", "sweep-k", "compare-drafts"])
def test_a_result_of_0_2_0_serves_as_a_baseline_and_as_a_page(command: str) -> None:
    """Each file is what 0.2.0 wrote of the built-in pair, with fewer tasks and positions."""
    path = str(Path(__file__).parent / "results_of_0_2_0" / f"{command}.json")
    old = read_baseline(path, f"specdec.{command}/1")
    assert old["specdec_version"] == "0.2.0"
    defaults, was = Recipe().as_dict(), old["recipe"]
    compared = {name: defaults[name] | was[name] for name in ("target", "workload", "sampling")}
    new = old | {"recipe": was | compared, "notices": []}
    judged = judge_document(new, Gates(baseline=path), old)
    assert judged
    assert all(one.passed and one.value == 1 for one in judged)
    assert not any("baseline" in notice for notice in new["notices"]), "neither another recipe nor another machine"
    new["recipe"]["target"]["compute"] = "int8"
    assert other_recipe(new, old) == "the baseline is of another target: the two are not comparable"
    assert "builtin:target" in html(old)
    assert "builtin:target" in markdown(old)
    assert f"specdec {command}" in junit(old)


def test_a_baseline_of_another_machine_or_another_way_is_said() -> None:
    new = {
        "plan": {"batch_size": 1, "chat": False},
        "environment": {"cpu": "Zen 4", "threads": 2, "torch": "2.9", "platform": "x"},
        "machine": {"num_cores": 2, "load_before": 1.0},
    }
    old = {
        "plan": {"batch_size": 4, "chat": True},
        "environment": {"cpu": "Zen 3", "threads": 8, "torch": "2.8", "platform": "y"},
        "machine": {"num_cores": 8, "load_before": 3.0},
    }
    assert other_circumstances(new, new) is None
    assert other_circumstances(new, old) == (
        "the baseline was measured differently: batch_size 4, here 1; chat true, here false; cpu Zen 3, here Zen 4; "
        "threads 8, here 2; num_cores 8, here 2; torch 2.8, here 2.9"
    )
    assert other_circumstances(new, {"plan": {"batch_size": 1}}) is None, "what an older document does not say"
    served = {"endpoint": {"server": "uvicorn", "version": "1"}, "environment": {"torch": "2.9"}}
    assert other_circumstances(served, served | {"environment": {"torch": "1"}}) is None, "a server's torch is its own"
    assert not_none(other_circumstances(served, {"endpoint": {"server": "uvicorn", "version": "2"}})).endswith(
        "version 2, here 1"
    )


@pytest.mark.parametrize(("median", "passed"), [(0.9, True), (1.0, True), (1.3, True), (1.5, False), (9.0, False)])
def test_a_servers_times_must_not_rise(median: float, passed: bool) -> None:
    def timed(seconds):
        return {"timing": {"ttft_s": {"median": seconds, "ci95": [0.8 * seconds, 1.25 * seconds]}}}

    (judged,) = against_baseline(timed(median), timed(1.0), "5%")
    assert judged.expression == "timing.ttft_s / baseline > 1.05"
    assert judged.passed is passed
