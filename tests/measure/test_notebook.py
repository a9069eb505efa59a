"""Traces, predictions and comparisons from Python: the figures are sweep-k's, and notebooks show them."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
from test_predict import made_costs
from toy_engine import toy_engine

import specdec_cli
from specdec_cli.cli.main import run
from specdec_cli.engine.engine import Engine
from specdec_cli.errors import UsageError
from specdec_cli.measure.bench import sweep
from specdec_cli.measure.notebook import ResultTable, trace
from specdec_cli.sampling.params import SamplingParams

PROMPTS = ["abcabc", "cab bca", "aab aab", "hgf"]
SHORT = SamplingParams(max_new_tokens=40)


def tracing(**options) -> Engine:
    toy = toy_engine()
    return Engine(toy.target, toy.drafter, toy.tokenizer, replace(toy.options, **options), toy.eos_token_ids)


@pytest.fixture
def fixed_costs(monkeypatch: pytest.MonkeyPatch):
    costs = made_costs()
    monkeypatch.setattr(sweep, "profile_workload", lambda *_, **__: costs)
    monkeypatch.setattr(sweep.Sweep, "profile_in_turn", lambda *_: None)
    return costs


def test_the_numbers_are_those_of_sweep_k(
    fixed_costs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "from_recipe", lambda *_, **__: toy_engine(5))
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    sweep_k = ["sweep-k", "--dataset", str(path), "-d", "ngram:min=1", "-n", "40", "--k-max", "5", "--json"]
    assert run(sweep_k) == 0
    document = json.loads(capsys.readouterr().out)
    table = trace(tracing(), PROMPTS, SHORT).predict(k=range(1, 6))
    assert len(document["rows"]) == len(table) == 5
    for wanted, row in zip(document["rows"], table, strict=True):
        predicted = wanted["predicted"]
        assert row["k"] == wanted["k"]
        assert row["acceptance_length"] == wanted["acceptance_length"]
        assert row["acceptance_rate"] == predicted["acceptance_rate"]["median"]
        assert row["speedup"] == predicted["speedup"]
        assert [row["speedup_low"], row["speedup_high"]] == (predicted["ci95"] or [None, None])
        assert {part: row[f"{part}_share"] for part in predicted["shares"]} == predicted["shares"]
        assert row["iid_speedup"] == document["iid"]["speedup_by_k"][str(row["k"])]


def test_pandas_and_notebooks_show_the_table(fixed_costs) -> None:
    table = trace(tracing(), PROMPTS, SHORT).predict(k=[4, 1])
    frame = table.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["k"]) == [1, 4]
    assert list(frame.columns) == list(table[0])
    assert list(frame["speedup"]) == [row["speedup"] for row in table]
    page = table._repr_html_()
    assert page.count("<tr>") == 3
    assert "acceptance_length" in page
    text = repr(table)
    assert text.splitlines()[0].split()[:2] == ["k", "acceptance_length"]
    assert table.caption in text
    assert table[:1] == [table[0]]


def test_markup_in_a_name_stays_text() -> None:
    page = ResultTable([{"draft": "<script>", "speedup": None}], "a < b")._repr_html_()
    assert "<script>" not in page
    assert "a &lt; b" in page
    assert "–" in page
    assert repr(ResultTable([])) == "no rows"


def test_without_pandas_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pandas is not installed"):
        ResultTable([{"k": 1}]).to_pandas()


def test_compare_ranks_drafts_beside_no_draft(fixed_costs) -> None:
    traced = trace(tracing(), PROMPTS, SHORT)
    table = traced.compare(["ngram:min=1", "ngram:min=4,max=4"], k=range(1, 6))
    assert {row["draft"] for row in table} == {"ngram:min=1", "ngram:min=4,max=4", "no draft"}
    speeds = [row["speedup"] or 0.0 for row in table]
    assert speeds == sorted(speeds, reverse=True)
    best = next(row for row in table if row["draft"] == "ngram:min=1")
    own = traced.predict("ngram:min=1", k=range(1, 6))
    assert best["speedup"] == max(row["speedup"] for row in own)
    assert isinstance(table.to_pandas(), pandas.DataFrame)


def test_costs_are_measured_once_per_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(sweep, "profile_workload", lambda *_: asked.append(1) or made_costs())
    traced = trace(tracing(), PROMPTS, SHORT)
    first = traced.predict(k=range(1, 6))
    assert traced.predict(k=range(1, 6)).rows == first.rows
    assert traced.predict(k=[5]).rows == first[4:]
    assert asked == [1]


def test_a_real_profile_on_the_engine_leaves_it_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep.profile_workload, "__defaults__", (1e-9, lambda _: None))
    said: list[Any] = []
    engine = tracing()
    traced = trace(engine, "abcabc", SHORT, progress=said.append)
    assert len(traced.predict(k=range(1, 4))) == 3
    assert not engine.has_work
    assert engine.generate("abc", SHORT)[0].text == toy_engine().generate("abc", SHORT)[0].text
    assert any("tracing the target" in one for one in said)
    assert "num_prompts=1" in repr(traced)


@pytest.mark.parametrize("prompts", ["abc", [1, 2, 3], ["abc", [4, 5]], [{"role": "user", "content": "abc"}]])
def test_prompts_are_those_that_generate_takes(prompts, fixed_costs) -> None:
    assert trace(tracing(), prompts, SHORT).trace.num_output_tokens > 0


@pytest.mark.parametrize("k", [[], [0], [65], 0, [-1, 2]])
def test_k_out_of_range_is_refused(k) -> None:
    with pytest.raises(UsageError, match="from 1 to 64"):
        trace(tracing(), "abc", SHORT).predict(k=k)


@pytest.mark.parametrize("k", [[1.5], "12", None, ["2"]])
def test_k_that_is_no_whole_number_is_refused(k) -> None:
    with pytest.raises(UsageError, match="whole numbers"):
        trace(tracing(), "abc", SHORT).predict(k=k)


def test_what_cannot_be_predicted_is_refused() -> None:
    traced = trace(tracing(), "abc", SHORT)
    for draft, wrong in (("none", "no draft"), ("nonsense:x=1", "nonsense"), ("ngram:minn=1", "minn")):
        with pytest.raises(UsageError, match=wrong):
            traced.predict(draft)
    with pytest.raises(UsageError, match="list of drafts"):
        traced.compare("ngram")
    with pytest.raises(UsageError, match="no prompt"):
        trace(tracing(), [], SHORT)
    with pytest.raises(UsageError):
        trace(tracing(verify="typical"), "abc", replace(SHORT, temperature=1.0)).predict()
    busy = tracing()
    busy.add("abc")
    with pytest.raises(UsageError, match="still decodes"):
        trace(busy, "abc")


def test_the_method_of_0_2_0_names_the_function() -> None:
    assert specdec_cli.Engine is Engine
    with pytest.raises(UsageError) as refused:
        tracing().trace(PROMPTS, SHORT)
    assert "specdec_cli.trace(engine, prompts)" in str(refused.value.hint)
