"""Gates: judged on whole intervals, on paths that exist, of enough pairs; and noise does not flip them."""

from typing import Any

import numpy as np
import pytest
from typed import not_none

from specdec_cli.document import ResultDocument, as_json
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import ExitCode, GateError, UsageError
from specdec_cli.measure.baseline import against_baseline
from specdec_cli.measure.documents.bench import BenchDocument
from specdec_cli.measure.documents.compare_drafts import CompareDocument
from specdec_cli.measure.documents.endpoint import EndpointDocument
from specdec_cli.measure.documents.sweep_k import SweepDocument
from specdec_cli.measure.gates import (
    Pairs,
    check_measurable,
    check_paths,
    judge,
    raise_if_crossed,
)
from specdec_cli.measure.imported.record import ImportDocument
from specdec_cli.measure.stats import paired
from specdec_cli.recipe.gate import parse_gate, parse_percentage
from specdec_cli.recipe.schema import Gates


def document(median=1.3, ci95=(1.1, 1.5), **more):
    interval = {"median": median, "ci95": None if ci95 is None else list(ci95), "pairs": 9}
    speedup = {"decode": interval, "latency": interval}
    return {"schema": "specdec.bench/1", "speedup": speedup, "efficiency": 0.5, **more}


def passes(text: str, found: dict[str, Any]) -> bool:
    return judge([not_none(parse_gate(text))], found)[0].passed


def test_expressions() -> None:
    gate = parse_gate(" by_task.copy-edit.speedup.decode<=1.2 ")
    assert (not_none(gate).path, not_none(gate).operator, not_none(gate).number) == (
        "by_task.copy-edit.speedup.decode",
        "<=",
        1.2,
    )
    assert str(parse_gate("a.b == 3e2")) == "a.b == 300"
    named = parse_gate("rows.ngram:max=4,min=2.speedup<=1.2")
    assert (not_none(named).path, not_none(named).operator, not_none(named).number) == (
        "rows.ngram:max=4,min=2.speedup",
        "<=",
        1.2,
    )
    assert (not_none(parse_gate("a=b==1")).path, not_none(parse_gate("a=b==1")).operator) == ("a=b", "==")
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
def test_a_gate_fails_only_when_the_whole_interval_is_on_the_failing_side(text: str, passed: bool) -> None:
    assert passes(text, document()) is passed


def test_what_was_not_measured_does_not_pass() -> None:
    assert not passes("efficiency < 0.1", document(efficiency=None))
    assert not passes("speedup.decode < 0.1", document(None, None))
    assert not passes("speedup.decode < 0.1", document(1.3, None))
    assert not passes("costs.draft_share > 0.9", document(costs=None))


def test_not_to_speculate_is_exactly_as_fast_as_plain_decoding() -> None:
    found = {"recommended": {"k": 0, "speedup": None}}
    assert passes("recommended.speedup < 0.9", found)
    assert not passes("recommended.speedup < 1.1", found)
    assert not passes("recommended.speedup.median < 1.1", found)
    assert not passes("recommended.speedup < 0.9", {"recommended": {"k": 3, "speedup": None}}), "it was not measured"


def test_a_figure_without_an_interval_is_said_to_be_one() -> None:
    [judged] = judge([not_none(parse_gate("speedup.decode < 0.1"))], document(1.3, None))
    assert (judged.value, judged.ci95, judged.passed) == (1.3, None, False)
    assert judged.reason == "speedup.decode is 1.3 without an interval to judge by, which takes 2 pairs or more"
    assert passes("speedup.decode.median < 1.2", document(1.3, None)), "the figure alone can be asked for"
    pair = {"a": "x", "b": "y", "speedup_ratio": 1.2, "ci95": [1.1, 1.3], "p_a_faster": 1.0}
    assert not passes("pairwise.0 > 1.0", {"pairwise": [pair]})
    assert passes("pairwise.0 < 1.2", {"pairwise": [pair]})


def row(draft, speedup):
    return {"draft": draft, "speedup": {"median": speedup, "ci95": [speedup - 0.1, speedup + 0.1], "pairs": 9}}


def test_a_draft_is_named_wherever_it_is_ranked() -> None:
    """Two drafts as fast as each other change places by noise; a name does not."""
    rows = [row("builtin:draft", 1.5), row("ngram:min=1", 0.8), row("./a.b", 1.2), row("./a", 0.9)]
    for ranked in (rows, rows[::-1]):
        found = {"rows": ranked}
        assert passes("rows.builtin:draft.speedup < 1.3", found)
        assert not passes("rows.ngram:min=1.speedup < 1.0", found)
        assert passes("rows../a.b.speedup < 1.0", found)
        assert not passes("rows../a.speedup < 1.1", found)
    names = {"rows": ["builtin:draft", "./a.b"], "rows../a.b.by_task": ["code"]}
    schema = CompareDocument.json_schema()
    check_paths(
        [not_none(parse_gate("rows../a.b.by_task.code.speedup < 1")), not_none(parse_gate("rows.0.speedup < 1"))],
        schema,
        names,
    )
    with pytest.raises(UsageError, match=r"`rows` has no `ngram`, but builtin:draft, \./a\.b, 0, 1"):
        check_paths([not_none(parse_gate("rows.ngram.speedup < 1"))], schema, names)


@pytest.mark.parametrize("document", [BenchDocument, SweepDocument, CompareDocument, ImportDocument, EndpointDocument])
def test_the_hint_names_paths_of_the_same_command(document: type[ResultDocument]) -> None:
    """A recipe's gates may be those of another command."""
    schema = document.json_schema()
    with pytest.raises(UsageError) as caught:
        check_paths([not_none(parse_gate("speed_up < 1"))], schema, {})
    hint = not_none(caught.value.hint).partition(": ")[2].partition(";")[0].split(", ")
    assert len(hint) >= 2
    for path in hint:
        gate = f"{path} == inconclusive" if path.endswith("verdict") else f"{path} < 1"
        check_paths([not_none(parse_gate(gate))], schema, {})


def test_lists_and_names_with_dots() -> None:
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
def test_paths_of_the_document(path: str) -> None:
    check_paths([not_none(parse_gate(f"{path} < 1"))], BenchDocument.json_schema(), NAMES)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("speedup.decod", "`speedup` has no `decod`, but decode, latency"),
        ("by_task.cod.speedup.decode", "`by_task` has no `cod`, but code, a.b"),
        ("speedup", "`speedup` is not a number"),
        ("recipe.target.model", "`recipe` has no `target`"),
        ("nothing", "the document has no `nothing`"),
        ("lossless.promised", "is not a number"),
    ],
)
def test_wrong_paths_are_refused_before_anything_runs(path: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_paths([not_none(parse_gate(f"{path} < 1"))], BenchDocument.json_schema(), NAMES)


def prompts(num, *tasks):
    return [PromptRow(i, "", category=tasks[i % len(tasks)]) for i in range(num)]


@pytest.mark.parametrize(
    ("gate", "num", "batch_size", "repeats", "said"),
    [
        ("speedup.decode < 1.1", 1, 1, 1, "takes 2 pairs (prompts, or batches of them), and there would be 1"),
        ("speedup.decode < 1.1", 2, 1, 1, None),
        ("speedup.decode < 1.1", 4, 4, 1, "there would be 1"),
        ("speedup.decode < 1.1", 8, 4, 1, None),
        ("speedup.decode < 1.1", 1, 1, 2, None),
        ("by_task.code.speedup.decode < 1", 2, 1, 1, "there would be 1"),
        ("by_task.code.speedup.decode.median < 1", 2, 1, 1, None),
        ("by_task.code.speedup.decode < 1", 4, 1, 1, None),
        ("lossless.mismatches > 0", 1, 1, 1, None),
        ("efficiency < 0.5", 1, 1, 1, None),
    ],
)
def test_gates_on_figures_that_will_have_no_interval_are_refused(
    gate: str, num: int, batch_size: int, repeats: int, said: str | None
) -> None:
    names, pairs = {"by_task": ["code", "a.b"]}, Pairs(prompts(num, "code", "a.b"), batch_size, repeats)
    if said is None:
        check_measurable(Gates(fail_if=(gate,)), BenchDocument.json_schema(), names, pairs)
        return
    with pytest.raises(UsageError) as caught:
        check_measurable(Gates(fail_if=(gate,)), BenchDocument.json_schema(), names, pairs)
    assert f"`--fail-if '{gate}'` is judged on an interval" in caught.value.message
    assert said in caught.value.message
    prompts_wanted = f"{2 * batch_size} prompts or more{' of that task' if 'by_task' in gate else ''}"
    path = not_none(parse_gate(gate)).path
    assert caught.value.hint == f"measure {prompts_wanted}, or judge the figure alone: {path}.median"


def test_predictions_rest_on_prompts_however_many_run_together() -> None:
    pairs = Pairs(prompts(12, "x"), 12, 1)
    check_measurable(Gates(fail_if=("rows.0.predicted < 1",)), SweepDocument.json_schema(), {}, pairs)
    assert pairs.under("by_task.x.3.acceptance_length") == pairs.under("rows.0.predicted") == 12
    with pytest.raises(UsageError, match="there would be 1") as caught:
        check_measurable(Gates(fail_if=("rows.0.measured < 1",)), SweepDocument.json_schema(), {}, pairs)
    assert not_none(caught.value.hint).endswith("rows.0.measured.speedup")


def test_a_baseline_takes_intervals_too() -> None:
    check_measurable(Gates(baseline="b.json"), BenchDocument.json_schema(), {}, Pairs(prompts(2, "x"), 1, 1))
    with pytest.raises(UsageError, match=r"`--baseline b\.json` is compared by intervals, which take 2 pairs"):
        check_measurable(Gates(baseline="b.json"), BenchDocument.json_schema(), {}, Pairs(prompts(1, "x"), 1, 1))


def speedups(rng, true_speedup, num=24):
    """A run's interval: 24 prompts that differ from each other, measured with 5 % of noise."""
    prompts = true_speedup * np.exp(np.random.default_rng(7).normal(0, 0.1, num))
    return as_json(paired(prompts * np.exp(rng.normal(0, 0.05, num)), np.exp(rng.normal(0, 0.05, num))).ratio)


def test_noise_flips_no_gate() -> None:
    """Issue 3, point 5: what should fail fails and what should pass passes, 20 times out of 20."""
    rng = np.random.default_rng(1)
    old = {"speedup": {"decode": speedups(rng, 1.5), "latency": speedups(rng, 1.5)}}
    for _ in range(20):
        same, worse = ({"speedup": {"decode": speedups(rng, s), "latency": speedups(rng, s)}} for s in (1.5, 1.2))
        assert passes("speedup.decode < 1.4", same)
        assert not passes("speedup.decode < 1.4", worse)
        assert all(one.passed for one in against_baseline(same, old, "5%"))
        assert not any(one.passed for one in against_baseline(worse, old, "5%"))


def test_a_crossed_gate_is_exit_code_three() -> None:
    judged = judge([not_none(parse_gate("efficiency < 0.6")), not_none(parse_gate("efficiency < 0.4"))], document())
    with pytest.raises(GateError, match=r"`efficiency < 0.6`: efficiency is 0.5") as caught:
        raise_if_crossed(judged)
    assert caught.value.exit_code == ExitCode.GATE
    raise_if_crossed(judged[1:])


def test_verdicts_are_words_that_gates_compare() -> None:
    assert str(parse_gate(" verdict==do-not-speculate ")) == "verdict == do-not-speculate"
    assert str(parse_gate("recommended.verdict != speculate")) == "recommended.verdict != speculate"
    for wrong in ("verdict < speculate", "verdict == yes", "a != 1", "verdict == Speculate", "!= speculate"):
        assert parse_gate(wrong) is None
    check_paths([not_none(parse_gate("verdict == inconclusive"))], CompareDocument.json_schema(), {})
    gate = not_none(parse_gate("by_batch_size.1.recommended.verdict == inconclusive"))
    check_paths([gate], SweepDocument.json_schema(), {})
    for kind, path in (
        (BenchDocument, "speedup.decode"),
        (SweepDocument, "recommended.k"),
        (CompareDocument, "winner"),
    ):
        with pytest.raises(UsageError, match=r"is not a (verdict|number)"):
            check_paths([not_none(parse_gate(f"{path} == speculate"))], kind.json_schema(), {})
    with pytest.raises(UsageError, match="`verdict` is not a number, but speculate, do-not-speculate or inconclusive"):
        check_paths([not_none(parse_gate("verdict == 1"))], CompareDocument.json_schema(), {})


@pytest.mark.parametrize(("verdict", "passed"), [("speculate", True), ("inconclusive", False), (None, False)])
def test_a_verdict_is_judged_like_a_figure(verdict: str | None, passed: bool) -> None:
    [judged] = judge([not_none(parse_gate("recommended.verdict != speculate"))], {"recommended": {"verdict": verdict}})
    assert judged.passed is passed
    assert judged.value == verdict


@pytest.mark.parametrize(
    ("recommended", "passed"),
    [
        ({"k": 0, "speedup": None}, False),  # a document of an earlier version
        ({"k": 0, "speedup": None, "verdict": "do-not-speculate"}, False),
        ({"k": 0, "speedup": {"median": 0.5, "ci95": [0.4, 3.0]}, "verdict": "inconclusive"}, True),
    ],
)
def test_not_to_speculate_is_as_fast_as_plain_decoding_and_inconclusive_is_not(recommended, passed: bool) -> None:
    assert passes("recommended.speedup < 1.2", {"recommended": recommended}) is passed


def test_an_inconclusive_sweep_of_nothing_has_no_figure() -> None:
    found = {"recommended": {"k": 0, "speedup": None, "verdict": "inconclusive"}}
    [judged] = judge([not_none(parse_gate("recommended.speedup < 1.2"))], found)
    assert (judged.passed, judged.reason) == (False, "nothing was measured")
