"""Gates: judged on whole intervals, on paths that exist, and against a baseline; and noise does not flip them."""

import json
import math

import numpy as np
import pytest

from specdec_cli.errors import ExitCode, GateError, UsageError
from specdec_cli.measure.gates import (
    against_baseline,
    check_paths,
    judge,
    other_recipe,
    raise_if_crossed,
    read_baseline,
)
from specdec_cli.measure.stats import paired
from specdec_cli.recipe.gate import parse_gate, parse_percentage
from specdec_cli.report.bench import json_schema


def document(median=1.3, ci95=(1.1, 1.5), **more):
    interval = {"median": median, "ci95": None if ci95 is None else list(ci95), "pairs": 9}
    speedup = {"decode": interval, "latency": interval}
    return {"schema": "specdec.bench/1", "speedup": speedup, "efficiency": 0.5, **more}


def passes(text: str, found: dict) -> bool:
    return judge([parse_gate(text)], found)[0].passed


def test_expressions():
    gate = parse_gate(" by_task.copy-edit.speedup.decode<=1.2 ")
    assert (gate.path, gate.operator, gate.number) == ("by_task.copy-edit.speedup.decode", "<=", 1.2)
    assert str(parse_gate("a.b == 3e2")) == "a.b == 300"
    for wrong in ("", "speedup.decode", "a = 1", "a < b", "a < nan", "a << 1", "< 1", "a < 1 2"):
        assert parse_gate(wrong) is None
    assert [parse_percentage(text) for text in ("5%", "0 %", "2.5%", "5", "100%", "-1%")] == [
        0.05,
        0.0,
        0.025,
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("speedup.decode < 1.2", True),  # part of the interval is above
        ("speedup.decode < 1.5", True),
        ("speedup.decode <= 1.5", False),
        ("speedup.decode < 1.6", False),
        ("speedup.decode > 1.0", False),
        ("speedup.decode > 1.1", True),
        ("speedup.decode >= 1.1", False),
        ("speedup.decode == 1.3", True),
        ("efficiency < 0.6", False),
        ("efficiency < 0.5", True),
        ("efficiency == 0.5", False),
    ],
)
def test_a_gate_fails_only_when_the_whole_interval_is_on_the_failing_side(text, passed):
    assert passes(text, document()) is passed


def test_what_was_not_measured_does_not_pass():
    assert not passes("efficiency < 0.1", document(efficiency=None))
    assert not passes("speedup.decode < 0.1", document(None, None))
    assert not passes("speedup.decode < 0.1", document(1.3, None))
    assert not passes("costs.draft_share > 0.9", document(costs=None))


def test_lists_and_names_with_dots():
    found = document(by_task={"a.b": {"n": 3}}, draft={"speculative": {"per_position_acceptance_rates": [0.9, 0.4]}})
    assert passes("by_task.a.b.n < 3", found)
    assert not passes("draft.speculative.per_position_acceptance_rates.1 < 0.5", found)
    assert not passes("draft.speculative.per_position_acceptance_rates.7 < 0.5", found)


NAMES = {"by_task": ["code", "a.b"], "against": ["transformers"]}


@pytest.mark.parametrize(
    "path",
    [
        "speedup.decode", "draft.speculative.acceptance_length", "by_task.code.speedup.decode", "lossless.mismatches",
        "by_task.a.b.draft.timing.ttft_s", "against.transformers.speedup.latency", "roofline.plain.fraction",
        "costs.verify_cost_ratio", "draft.speculative.per_position_acceptance_rates.0", "speedup.decode.median",
    ],
)  # fmt: skip
def test_paths_of_the_document(path):
    check_paths([parse_gate(f"{path} < 1")], json_schema(), NAMES)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("speedup.decod", "`speedup` has no `decod`, but decode, latency"),
        ("by_task.cod.speedup.decode", "`by_task` has no `cod`, but code, a.b"),
        ("speedup", "`speedup` is no number"),
        ("recipe.target.model", "`recipe` has no `target`"),
        ("nothing", "the document has no `nothing`"),
        ("lossless.promised", "is no number"),
    ],
)
def test_wrong_paths_are_refused_before_anything_runs(path, said):
    with pytest.raises(UsageError, match=said):
        check_paths([parse_gate(f"{path} < 1")], json_schema(), NAMES)


def test_a_regression_is_judged_on_the_ratio_of_both_intervals():
    old = document(1.5, (1.45, 1.55))
    same, slightly, much = document(1.48, (1.4, 1.56)), document(1.4, (1.35, 1.45)), document(1.2, (1.15, 1.25))
    results = [[one.passed for one in against_baseline(new, old, "5%")] for new in (same, slightly, much)]
    assert results == [[True, True], [True, True], [False, False]]
    judged = against_baseline(much, old, "5%")[0]
    assert judged.value == pytest.approx(0.8)
    assert judged.ci95[1] == pytest.approx(0.8 * math.exp(math.hypot(math.log(1.25 / 1.2), math.log(1.5 / 1.45))))
    assert [one.passed for one in against_baseline(document(None, None), old, "5%")] == [False, False]


def speedups(rng, true_speedup, num=24):
    """A run's interval: 24 prompts that differ from each other, measured with 5 % of noise."""
    prompts = true_speedup * np.exp(np.random.default_rng(7).normal(0, 0.1, num))
    return paired(prompts * np.exp(rng.normal(0, 0.05, num)), np.exp(rng.normal(0, 0.05, num))).ratio.as_dict()


def test_noise_flips_no_gate():
    """Issue 3, point 5: what should fail fails and what should pass passes, 20 times out of 20."""
    rng = np.random.default_rng(1)
    old = {"speedup": {"decode": speedups(rng, 1.5), "latency": speedups(rng, 1.5)}}
    for _ in range(20):
        same, worse = ({"speedup": {"decode": speedups(rng, s), "latency": speedups(rng, s)}} for s in (1.5, 1.2))
        assert passes("speedup.decode < 1.4", same)
        assert not passes("speedup.decode < 1.4", worse)
        assert all(one.passed for one in against_baseline(same, old, "5%"))
        assert not any(one.passed for one in against_baseline(worse, old, "5%"))


def test_a_baseline_must_be_one(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(document()))
    assert read_baseline(str(path), "specdec.bench/1")["efficiency"] == 0.5
    for text, said in (
        ("{", "no JSON"),
        ('{"schema": "x"}', "no `specdec.bench/1`"),
        (json.dumps(document(1.0, None)), "no interval"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            read_baseline(str(path), "specdec.bench/1")
    with pytest.raises(UsageError, match="cannot be read"):
        read_baseline(str(tmp_path / "none.json"), "specdec.bench/1")


def test_an_unlike_baseline_is_said():
    new, old = ({"recipe": {"target": {"model": name}, "workload": {}, "sampling": {}}} for name in "ab")
    assert other_recipe(new, old) == "the baseline is of another target: the two are not alike"
    assert other_recipe(new, new) is None


def test_a_crossed_gate_is_exit_code_three():
    judged = judge([parse_gate("efficiency < 0.6"), parse_gate("efficiency < 0.4")], document())
    with pytest.raises(GateError, match=r"`efficiency < 0.6`: efficiency is 0.5") as caught:
        raise_if_crossed(judged)
    assert caught.value.exit_code == ExitCode.GATE
    raise_if_crossed(judged[1:])
