"""`sweep-k` as a person meets it: the report, the document, the trace's file, the tuned recipe, gates, refusals."""

import csv
import json
import re
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pytest
from toy_clock import toy_clock
from toy_engine import LETTERS, LetterTokenizer, TableLM, toy_engine
from typed import not_none, stand_in

from specdec_cli.cli.main import run
from specdec_cli.drafters import create
from specdec_cli.drafters.contract import Resources
from specdec_cli.engine.build import engine_options
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.measure.bench import sweep
from specdec_cli.measure.bench.candidates import candidates
from specdec_cli.measure.predict import traced
from specdec_cli.measure.predict.draft_shape import DraftShape
from specdec_cli.measure.predict.evidence import Evidence
from specdec_cli.measure.predict.predict import Predicted, choose
from specdec_cli.measure.stats import Interval
from specdec_cli.recipe import resolve
from specdec_cli.report.sweep_k import json_schema
from specdec_cli.tree_shape import TreeShape


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch):
    """Engines that the command made, of toys, whose costs are profiled no longer than they must."""
    engines = []

    def load(recipe, *, trust_remote_code: bool = False, progress=None):
        speculation = recipe.speculation
        engines.append(toy_engine(speculation.num_speculative_tokens, recipe.engine.max_num_seqs, speculation.verify))
        return engines[-1]

    monkeypatch.setattr(Engine, "from_recipe", load)
    monkeypatch.setattr(sweep.profile_workload, "__defaults__", (1e-9, lambda _: None))
    for name in ("NO_COLOR", "CI", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return engines


def sweep_k(*arguments: str) -> int:
    words = ["sweep-k", "-d", "ngram:min=1", "-n", "12", "--num-prompts", "6", "--k-max", "4", *arguments]
    return int(run(words))


def checked(text: str) -> dict[str, Any]:
    document = json.loads(text)
    jsonschema.validate(document, json_schema(), format_checker=jsonschema.FormatChecker())
    return document


def slow_target(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.002) -> None:
    """A target that is dear by the call, so that an n-gram draft pays."""
    clock, score = toy_clock(monkeypatch), TableLM.score

    def slowly(self, rows):
        clock.sleep(seconds)
        return score(self, rows)

    monkeypatch.setattr(TableLM, "score", slowly)


def test_the_report_goes_to_stdout(loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    slow_target(monkeypatch)
    assert sweep_k("-n", "24") == 0
    out, err = capsys.readouterr()
    for word in ("predicted (95 %)", "measured (95 %)", "Textbook", "Published guidance: 2 to 6", "Recommended: "):
        assert word in out
    assert "\x1b" not in out + err


def test_the_document(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_k("--json") == 0
    document = checked(capsys.readouterr().out)
    rows = document["rows"]
    assert [row["k"] for row in rows] == [1, 2, 3, 4]
    assert len(document["costs"]["target_seconds_by_rows"]) == 5
    measured = [row["k"] for row in rows if row["measured"]]
    assert measured == document["plan"]["measured_k"]
    assert 1 <= len(measured) <= 3
    assert document["plan"]["repeats"] == 1
    assert document["plan"]["passes"] == (1 + len(measured)) * 6
    assert document["lossless"]["mismatches"] == 0
    assert document["lossless"]["checked_tokens"] == len(measured) * 6 * 12
    assert document["k_by_batch"] == f"1:{document['recommended']['k']}"
    [alone] = document["by_batch_size"]
    assert alone["batch_size"] == document["plan"]["batch_size"] == 1
    assert all(alone[name] == document[name] for name in ("rows", "recommended", "costs"))
    assert document["costs"]["rounds_in_turn"] == document["costs"]["repeats"] == 7, "six turns"
    assert not any("to tell how sure they are" in one for one in document["notices"])
    assert set(document["iid"]["speedup_by_k"]) == {"1", "2", "3", "4"}


def test_every_k_is_measured_when_asked_and_the_best_is_recommended(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_target(monkeypatch)
    assert sweep_k("--json", "--exhaustive", "--dataset", "builtin:mini", "-n", "24") == 0
    document = checked(capsys.readouterr().out)
    assert all(row["measured"] for row in document["rows"])
    best = max(document["rows"], key=lambda row: (row["measured"]["speedup"], -row["k"]))
    recommended = document["recommended"]
    assert recommended["k"] == best["k"]
    assert recommended["speedup"]["median"] == best["measured"]["speedup"] > 1
    assert f"k = {best['k']} decodes" in recommended["why"]
    assert "published guidance of 2 to 6" in recommended["why"]
    for row in document["rows"]:
        assert row["acceptance_length"] == pytest.approx(row["measured"]["acceptance_length"]), "replay is exact"


def test_the_document_says_what_would_be_accepted_by_depth_task_and_place(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_target(monkeypatch)
    words = ("--exhaustive", "--num-prompts", "24", "-n", "24")
    assert sweep_k("--json", *words, "--fail-if", "by_task.code.3.acceptance_length.median > 5") == 0
    document = checked(capsys.readouterr().out)
    for row in document["rows"]:
        predicted, measured = row["predicted"], row["measured"]
        assert predicted["acceptance_length"]["median"] == row["acceptance_length"]
        low, high = predicted["acceptance_length"]["ci95"]
        assert low <= row["acceptance_length"] <= high
        assert predicted["acceptance_rate"]["median"] == pytest.approx(measured["acceptance_rate"])
        assert predicted["per_position_acceptance_rates"] == pytest.approx(measured["per_position_acceptance_rates"])
        for name in ("per_position_ci95", "conditional_acceptance_rates", "conditional_ci95"):
            assert len(predicted[name]) == row["k"]
        assert len(predicted["acceptance_histogram"]) == row["k"] + 1
    assert set(document["by_task"]) == set(document["workload"]["tasks"])
    assert all([one["k"] for one in rows] == [1, 2, 3, 4] for rows in document["by_task"].values())
    assert (document["by_position"][0]["from"], document["by_position"][-1]["to"]) == (1, 23)
    assert document["table"] is None
    assert sweep_k("--num-prompts", "24", "-n", "24") == 0
    out = capsys.readouterr().out
    for how in ("by task: chat", "by output position: 1–"):
        assert how in out


def test_a_sweep_takes_at_most_a_third_of_the_exhaustive_ones_passes(
    loaded, capsys: pytest.CaptureFixture[str]
) -> None:
    passes = []
    for how, repeats in (([], 1), (["--exhaustive"], 2)):
        assert sweep_k("--json", "--k-max", "8", *how) == 0
        plan = checked(capsys.readouterr().out)["plan"]
        assert plan["repeats"] == repeats
        passes.append(plan["passes"])
        assert sweep_k("--dry-run", "--json", *how) == 0
        assert json.loads(capsys.readouterr().out)["repeats"] == repeats
    assert passes[1] == 9 * 6 * 2
    assert passes[0] <= passes[1] / 3
    assert sweep_k("--dry-run", "--repeats", "3") == 0
    assert "measure the best few of them 3 times" in capsys.readouterr().out
    assert sweep_k("--help-all") == 0
    assert "[default: 1; 2 with --exhaustive; at least 1]" in " ".join(capsys.readouterr().out.split())


def by_batch(monkeypatch: pytest.MonkeyPatch, best: dict[int, int], plain_seconds: float = 2.0) -> None:
    """Every k takes known seconds at every batch size: the best one's 1, another's 1.5; no trace foretells them."""
    from specdec_cli.engine.arms import ArmRun, EngineArm
    from specdec_cli.engine.outputs import Timing

    def run(arm, requests, stopped):
        k, num = arm.num_speculative_tokens, len(requests)
        seconds = plain_seconds if k == 0 else 1.0 if k == best[num] else 1.5
        tokens = tuple((1,) * 4 for _ in requests)
        return None if stopped() else ArmRun(tokens, Timing(0.1, seconds, seconds, None), num)

    monkeypatch.setattr(EngineArm, "run", run)
    monkeypatch.setattr(sweep.Sweep, "_evidence", lambda _, one: Evidence(one.speedup))


def test_every_batch_size_gets_its_own_k(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    by_batch(monkeypatch, {1: 4, 3: 2, 6: 1})
    path, times, trace_target = tmp_path / "tuned.yaml", [], traced.trace_target
    monkeypatch.setattr(traced, "trace_target", lambda *a, **b: times.append(1) or trace_target(*a, **b))
    words = ["--batch-sizes", "6,1,3", "--exhaustive", "--num-prompts", "36"]
    assert sweep_k("--json", *words, "--write-recipe", str(path), "--quiet") == 0
    document = checked(capsys.readouterr().out)
    assert [one["batch_size"] for one in document["by_batch_size"]] == document["plan"]["batch_sizes"] == [1, 3, 6]
    assert [one["recommended"]["k"] for one in document["by_batch_size"]] == [4, 2, 1]
    assert [one["costs"]["batch_size"] for one in document["by_batch_size"]] == [1, 3, 6]
    assert document["k_by_batch"] == "1:4,3:2,6:1"
    assert document["recommended"] == document["by_batch_size"][0]["recommended"]
    assert document["rows"] == document["by_batch_size"][0]["rows"]
    assert document["plan"]["passes"] == 5 * 2 * (36 + 12 + 6)
    table = document["table"]
    assert table["max_num_seqs"] == 6
    assert sum(table["share_of_steps"].values()) == pytest.approx(1)
    assert table["share_of_steps"]["6"] > 0.5
    assert 1 < table["tokens_per_step"]["median"] < document["rows"][3]["acceptance_length"]
    assert len(times) == 1
    assert any("predictions at batch size 3, 6 are approximate" in one for one in document["notices"])
    recipe = resolve(path).recipe
    assert recipe.engine.max_num_seqs == 8
    assert recipe.speculation.k_by_batch == ((1, 4), (3, 2), (6, 1))
    assert recipe.speculation.num_speculative_tokens == 4
    assert path.read_text().startswith("# By `specdec sweep-k`: Batch size 1: k = 4 decodes")
    assert sweep_k(*words, "--quiet") == 0
    out = capsys.readouterr().out
    assert "k by batch size: --k-by-batch 1:4,3:2,6:1 (predicted: " in out
    assert "Recommended at batch size 3: k = 2 decodes" in out
    assert [line.split()[:2] for line in out.splitlines() if line.rstrip().endswith("2.00× (2.00–2.00)")] == [
        ["1", "4"], ["3", "2"], ["6", "1"],
    ]  # fmt: skip


def recommended(size: int, k: int, verdict: str | None = None) -> dict[str, Any]:
    """What a tuned recipe is made of."""
    said = verdict or ("speculate" if k else "do-not-speculate")
    needs = ["a quiet machine"] if said == "inconclusive" else []
    return {"batch_size": size, "recommended": {"k": k, "tree": None, "why": "so", "verdict": said, "needs": needs}}


def test_a_tuned_recipe_holds_what_was_decided_and_what_the_user_set(tmp_path: Path) -> None:
    from specdec_cli.report.tuned_recipe import tuned_recipe

    own = tmp_path / "own.yaml"
    pair = "target: {model: builtin:target}\ndraft: {model: builtin:draft}\n"
    own.write_text(pair + "sampling: {top_p: 0.9, temperature: 0.7}\nserve: {port: 8123}\n")
    flags: dict[str, Any] = {"sampling.max_new_tokens": (32, "-n"), "workload.num_prompts": (6, "--num-prompts")}
    flags |= {"sampling.temperature": (0.8, "--temperature"), "gates.fail_if": (["recommended.k < 1"], "--fail-if")}
    resolved = resolve(own, flags=flags)
    text = tuned_recipe(resolved, {"by_batch_size": [recommended(1, 4)]})
    assert text.splitlines()[1:] == [
        "target:",
        "  model: builtin:target",
        "draft:",
        "  model: builtin:draft",
        "speculation:",
        "  num_speculative_tokens: 4",
        "sampling:",
        "  temperature: 0.8",
        "  top_p: 0.9",
        "serve:",
        "  port: 8123",
    ]


@pytest.mark.parametrize("k", [0, 4])
def test_a_tuned_recipe_is_served_where_no_key_is_set(tmp_path: Path, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_cli.cli.serve import _check_key_variable
    from specdec_cli.report.tuned_recipe import tuned_recipe

    monkeypatch.delenv("SPECDEC_API_KEY", raising=False)
    path = tmp_path / "tuned.yaml"
    path.write_text(tuned_recipe(resolve("builtin"), {"by_batch_size": [recommended(1, k)]}))
    _check_key_variable(resolve(path))
    assert resolve(path).recipe.sampling == resolve("builtin").recipe.sampling


def test_a_large_batch_has_room_in_the_document_and_in_the_tuned_recipe(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    by_batch(monkeypatch, {1: 4, 4: 2})
    path = tmp_path / "tuned.yaml"
    sets = ["--set", "engine.enable_prefix_caching=true", "--set", "engine.max_num_seqs=3"]
    words = ["--batch-sizes", "1,4", "--exhaustive", "--num-prompts", "24", *sets]
    assert sweep_k("--json", "--quiet", *words, "--write-recipe", str(path)) == 0
    document, recipe = checked(capsys.readouterr().out), resolve(path).recipe
    assert document["recipe"]["engine"]["max_num_seqs"] == recipe.engine.max_num_seqs == 4
    assert recipe.speculation.k_by_batch == ((1, 4), (4, 2))
    assert not document["recipe"]["engine"]["enable_prefix_caching"]
    assert recipe.engine.enable_prefix_caching, "which is for whoever uses the recipe"
    assert loaded[0].options.max_num_seqs == 4
    assert any("max_num_seqs is 4 here, not 3" in one for one in document["notices"])


@pytest.mark.parametrize(
    "synthetic",
    [
        {"synthetic_acceptance_rates": (0.9, 0.7, 0.5, 0.2)},
        {"synthetic_acceptance_length": 4.5},
    ],
)
@pytest.mark.parametrize("ks", [{1: 2}, {1: 0}, {1: 3, 4: 1}, {2: 1, 4: 3}, {2: 0, 4: 4}, {1: 0, 4: 0}])
def test_a_recipe_tuned_with_synthetic_acceptance_reads_back(tmp_path: Path, synthetic, ks) -> None:
    from specdec_cli.engine.synthetic import synthetic_rates
    from specdec_cli.report.tuned_recipe import tuned_recipe

    swept = {"speculation.num_speculative_tokens": 4} | {f"speculation.{key}": one for key, one in synthetic.items()}
    sets = [f"{key}={list(one) if isinstance(one, tuple) else one}" for key, one in swept.items()]
    resolved = resolve(sets=sets)
    found = [recommended(size, k) for size, k in ks.items()]
    path = tmp_path / "tuned.yaml"
    path.write_text(tuned_recipe(resolved, {"by_batch_size": found}))
    tuned = resolve(path).recipe
    most = max(ks.values())
    assert tuned.speculation.num_speculative_tokens == most
    if most == 0:
        assert (tuned.draft.method, tuned.speculation.verify) == ("none", "auto")
        return
    rates = synthetic_rates(resolved.recipe.speculation)
    assert synthetic_rates(tuned.speculation) == pytest.approx(not_none(rates)[:most])
    table = tuned.speculation.k_by_batch or ()
    assert (table[-len(ks) :] == tuple(ks.items())) is (len(ks) > 1)
    assert dict(table).get(1, most) == ks[min(ks)]


def test_k_ends_where_the_synthetic_rates_do(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(recipe, **_):
        drafter = create("ngram", {"min": 1})
        drafter.load(Resources(lambda name: TableLM(), LetterTokenizer().encode, len(LETTERS)))
        return Engine(TableLM(), drafter, stand_in(LetterTokenizer()), engine_options(recipe), eos_token_ids=(0,))

    monkeypatch.setattr(Engine, "from_recipe", load)
    words = ["--exhaustive", "--set", "speculation.num_speculative_tokens=2"]
    words += ["--synthetic-acceptance-rates", "0.8,0.5", "--json", "--quiet"]
    assert sweep_k(*words) == 0
    document = checked(capsys.readouterr().out)
    assert [row["k"] for row in document["rows"]] == [1, 2]
    assert document["plan"]["k_max"] == 2
    assert "k ends at 2, not at 4, because so many synthetic acceptance rates are given" in document["notices"]
    assert sweep_k(*words, "--k-max", "1") == 0
    assert not any("k ends at" in one for one in checked(capsys.readouterr().out)["notices"])


def test_a_baseline_is_judged_by_what_was_recommended(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, words = tmp_path / "old.json", ["--exhaustive", "--num-prompts", "12", "--quiet"]
    by_batch(monkeypatch, {1: 4, 2: 2})
    assert sweep_k(*words, "--batch-sizes", "1,2", "--output", str(path)) == 0
    words += ["--json", "--baseline", str(path)]
    assert sweep_k(*words, "--batch-sizes", "1,2", "--max-regression", "1%") == 0
    gates = checked(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))["gates"]
    assert [gate["expression"] for gate in gates] == [
        "recommended.speedup / baseline < 0.99", "by_batch_size.1.recommended.speedup / baseline < 0.99",
    ]  # fmt: skip
    by_batch(monkeypatch, {1: 4, 2: 2}, plain_seconds=1.7)
    assert sweep_k(*words) == 3
    assert "gate crossed: `recommended.speedup / baseline < 0.95`" in capsys.readouterr().err
    assert sweep_k(*words, "--max-regression", "20%") == 0
    by_batch(monkeypatch, {1: 4, 2: 2}, plain_seconds=0.5)
    assert sweep_k(*words, "--max-regression", "20%") == 3
    assert "recommended.speedup is 1, the baseline's 2: 0.5 of it" in capsys.readouterr().err


def test_the_other_files(loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = {name: tmp_path / f"r.{name}" for name in ("markdown", "csv", "junit")}
    flags = [word for name, path in names.items() for word in (f"--{name}", str(path))]
    words = ["--batch-sizes", "1,2", *flags, "--fail-if", "lossless.mismatches > 0", "--json", "--quiet"]
    assert sweep_k(*words) == 0
    document, text = checked(capsys.readouterr().out), names["markdown"].read_text()
    for said in ("## specdec sweep-k: builtin:target with ngram", "### Every k, batch size 2", "| passed | lossless."):
        assert said in text
    assert all(f"Note: {notice}" in text for notice in document["notices"])
    rows = list(csv.DictReader(names["csv"].read_text().splitlines()))
    assert [(row["batch_size"], row["k"]) for row in rows] == [(size, k) for size in "12" for k in "1234"]
    found = document["by_batch_size"][1]["rows"][0]["predicted"]["speedup"]
    assert float(rows[4]["predicted_speedup"]) == found
    assert sum(int(row["recommended"]) for row in rows) == sum(
        one["recommended"]["verdict"] == "speculate" for one in document["by_batch_size"]
    )
    suite = ElementTree.parse(names["junit"]).getroot()
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == ("specdec sweep-k", "4", "0")
    verdicts = [one["recommended"]["verdict"] for one in document["by_batch_size"]]
    assert suite.get("skipped") == str(verdicts.count("inconclusive"))
    assert [row["verdict"] for row in rows] == [verdict for verdict in verdicts for _ in range(4)]
    assert sweep_k(*words) == 2
    assert "already exists" in capsys.readouterr().err


def contradicted(monkeypatch: pytest.MonkeyPatch, best: float = 0.43, other: float = 1.7) -> None:
    """The issue's case: k = 3 is predicted 2.97 (1.92 to 4.99), and two prompts are measured 0.43 and 1.70."""
    from specdec_cli.engine.arms import ArmRun, EngineArm
    from specdec_cli.engine.outputs import Timing

    places: dict[int, int] = {}

    def run(arm, requests, stopped):
        place = places.setdefault(requests[0].row.index, len(places))
        faster = (best if place % 2 else other) if arm.num_speculative_tokens else 1.0
        tokens = tuple((1,) * 4 for _ in requests)
        return ArmRun(tokens, Timing(0.1, 1 / faster, 1 / faster, None), len(requests))

    def predict(self, k_max, costs, trees=()):
        made = original(self, k_max, costs, trees)
        rows = [replace(row, speedup=Interval(2.97 - abs(row.k - 3) / 9, (1.92, 4.99), 24)) for row in made.rows]
        return replace(made, rows=rows, recommended=choose(rows))

    original = traced.Traced.predict
    monkeypatch.setattr(EngineArm, "run", run)
    monkeypatch.setattr(traced.Traced, "predict", predict)


INCONCLUSIVE = ["--num-prompts", "2", "--quiet", "--set", "speculation.num_speculative_tokens=3"]


def without_figures(text: str) -> str:
    return re.sub(r"\d+\.\d+", "#", text)


def test_contradictory_evidence_is_inconclusive_everywhere(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    toy_clock(monkeypatch)  # which k are measured depends on costs, and the command runs twice
    contradicted(monkeypatch)
    names = {name: tmp_path / f"r.{name}" for name in ("markdown", "csv", "junit", "html")}
    flags = [word for name, path in names.items() for word in (f"--{name}", str(path))]
    assert sweep_k(*INCONCLUSIVE, "--json", *flags) == 0, "exit code 0, as for the other verdicts"
    document = checked(capsys.readouterr().out)
    found = document["recommended"]
    assert (found["verdict"], found["k"], document["k_by_batch"]) == ("inconclusive", 3, "1:3")
    assert found["why"].startswith("prediction and measurement exclude each other: k = ")
    assert found["needs"][0] == "a quiet machine"
    assert found["speedup"]["ci95"] == [pytest.approx(0.43), 4.99]
    said = f"Inconclusive: {found['why']}. To settle it: {'; '.join(found['needs'])}."
    assert f"**{said}" in names["markdown"].read_text()
    assert "| in use |" in names["markdown"].read_text()
    assert said.replace("'", "&#39;") in names["html"].read_text()
    rows = list(csv.DictReader(names["csv"].read_text().splitlines()))
    assert {(row["recommended"], row["verdict"]) for row in rows} == {("0", "inconclusive")}
    [verdict] = ElementTree.parse(names["junit"]).getroot().iterfind("testcase[@name='verdict']")
    assert not_none(not_none(verdict.find("skipped")).get("message")).startswith(said)
    assert sweep_k(*INCONCLUSIVE) == 0
    out = capsys.readouterr().out
    assert "Published guidance: 2 to 6 tokens; here: inconclusive." in out
    said = f"{said} Until then the draft and k = 3 stay as they are."
    assert without_figures(said) in without_figures(" ".join(out.split())), "it was measured again"
    assert "do not speculate" not in out
    assert [line.split()[0] for line in out.splitlines() if line.rstrip().endswith("in use")] == ["3"]


def test_an_inconclusive_sweep_keeps_the_draft_and_k(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contradicted(monkeypatch)
    path = tmp_path / "tuned.yaml"
    assert sweep_k(*INCONCLUSIVE, "--write-recipe", str(path)) == 0
    recipe = resolve(path).recipe
    assert (recipe.draft.method, stand_in(recipe.draft).min, recipe.speculation.num_speculative_tokens) == (
        "ngram",
        1,
        3,
    )
    assert path.read_text().startswith("# By `specdec sweep-k`: Inconclusive: prediction and measurement exclude each")
    assert sweep_k(*INCONCLUSIVE, "--batch-sizes", "1,2", "--write-recipe", str(path), "--force") == 0
    recipe = resolve(path).recipe
    assert (recipe.draft.method, recipe.speculation.num_speculative_tokens) == ("ngram", 3)
    assert recipe.speculation.k_by_batch is None, "a table of what is not known would be none"


@pytest.mark.parametrize(
    ("gate", "code"),
    [
        ("recommended.verdict == inconclusive", 3),
        ("recommended.verdict != speculate", 3),
        ("recommended.verdict != inconclusive", 0),
        ("recommended.verdict == do-not-speculate", 0),
        ("by_batch_size.0.recommended.verdict==inconclusive", 3),
        ("recommended.k < 1", 0),
        ("recommended.speedup < 1.2", 0),  # all that is known is 0.43 to 4.99
        ("recommended.speedup < 5", 3),
        ("recommended.verdict < 1", 2),
        ("recommended.verdict == maybe", 2),
        ("recommended.verdict > inconclusive", 2),
        ("recommended.k == inconclusive", 2),
        ("recommended.k != 1", 2),
        ("recommended.needs == inconclusive", 2),
    ],
)
def test_gates_ask_for_a_verdict(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gate: str, code: int
) -> None:
    contradicted(monkeypatch)
    assert sweep_k(*INCONCLUSIVE, "--json", "--fail-if", gate) == code
    out, err = capsys.readouterr()
    if code == 3 and "verdict" in gate:
        [judged] = checked(out)["gates"]
        assert (judged["value"], judged["passed"]) == ("inconclusive", False)
        assert "recommended.verdict is inconclusive" in err


def test_a_baseline_is_not_undercut_by_what_is_not_known(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, evidence = tmp_path / "old.json", sweep.Sweep._evidence
    by_batch(monkeypatch, {1: 4, 2: 2})
    assert sweep_k("--exhaustive", "--num-prompts", "12", "--quiet", "--output", str(path)) == 0
    contradicted(monkeypatch)
    monkeypatch.setattr(sweep.Sweep, "_evidence", evidence)
    assert sweep_k(*INCONCLUSIVE, "--baseline", str(path)) == 0


def test_a_table_keeps_the_k_in_use_where_a_batch_size_is_inconclusive() -> None:
    from specdec_cli.report.tuned_recipe import tuned_recipe

    given = resolve(sets=["speculation.num_speculative_tokens=5"])
    for found, table in (
        ([recommended(1, 3), recommended(8, 5, "inconclusive")], "k_by_batch: 1:3,8:5"),
        ([recommended(1, 0), recommended(8, 5, "inconclusive")], "k_by_batch: 1:0,8:5"),
    ):
        text = tuned_recipe(given, {"by_batch_size": found}).replace('"', "")
        assert table in text
        said = text.replace("\n# ", " ")
        assert "Batch size 8: Inconclusive: so. To settle it: a quiet machine. Until then the draft and k = 5" in said


def test_a_busy_machine_keeps_the_draft(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its load is the issue's, and what it measures is slower without a doubt."""
    monkeypatch.setattr("psutil.getloadavg", lambda: (50.0, 50.0, 50.0))
    by_batch(monkeypatch, {1: 4}, plain_seconds=0.5)
    path = tmp_path / "tuned.yaml"
    assert sweep_k("--exhaustive", "--write-recipe", str(path), "--json", "--quiet") == 0
    document = checked(capsys.readouterr().out)
    assert document["recommended"]["verdict"] == "inconclusive"
    assert document["machine"]["busy"].startswith("the machine was busy: load 50.0 on")
    assert document["recommended"]["needs"] == ["a quiet machine"]
    assert resolve(path).recipe.draft.method == "ngram"


def test_where_no_batch_size_pays_the_draft_goes(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tuned.yaml"
    by_batch(monkeypatch, {1: 4, 3: 2}, plain_seconds=0.5)
    words = ("--exhaustive", "--write-recipe", str(path), "--force", "--num-prompts", "18")
    assert sweep_k("--batch-sizes", "1,3", *words, "--json") == 0
    assert checked(capsys.readouterr().out)["k_by_batch"] == "1:0,3:0"
    found = resolve(path).recipe
    assert (found.draft.method, found.speculation.k_by_batch) == ("none", None)


def test_a_table_that_begins_without_a_draft_keeps_it_from_smaller_batches() -> None:
    from specdec_cli.recipe import resolve as resolved
    from specdec_cli.report.tuned_recipe import tuned_recipe

    found = [recommended(size, k) for size, k in ((2, 0), (4, 3))]
    text = tuned_recipe(resolved(), {"by_batch_size": found})
    assert "k_by_batch: 1:0,2:0,4:3" in text.replace('"', "")
    assert "num_speculative_tokens: 3" in text


def bad_engine(k: int) -> Engine:
    """A draft model that hardly ever agrees, and costs what the target costs."""
    drafter = create("model", {"model": "draft"})
    drafter.load(Resources(lambda name: TableLM(seed=9), LetterTokenizer().encode, len(LETTERS)))
    return Engine(
        TableLM(), drafter, stand_in(LetterTokenizer()), EngineOptions(num_speculative_tokens=k), eos_token_ids=(0,)
    )


def test_prompts_without_a_second_token_are_no_interruption(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_k("--exhaustive", "--temperature", "1", "--verify", "typical", "-n", "1") == 1
    assert "no prompt decoded a second token" in capsys.readouterr().err


def test_shares_of_no_step_are_null(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_k("-n", "1", "--json", "--quiet") == 0
    assert [row["predicted"]["shares"] for row in checked(capsys.readouterr().out)["rows"]] == [None] * 4


def test_a_bad_draft_is_advised_against(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow_target(monkeypatch, 0.001)
    monkeypatch.setattr(Engine, "from_recipe", lambda recipe, **_: bad_engine(4))
    path = tmp_path / "tuned.yaml"
    words = ["sweep-k", "-t", "t", "-d", "d", "-n", "12", "--num-prompts", "6", "--k-max", "3", "--json"]
    assert int(run([*words, "--write-recipe", str(path), "--fail-if", "recommended.k < 1"])) == 3
    out, err = capsys.readouterr()
    recommended = checked(out)["recommended"]
    assert (recommended["k"], recommended["speedup"]) == (0, None)
    assert recommended["why"].startswith("do not speculate: even the best k = ")
    assert "gate crossed: `recommended.k < 1`" in err
    recipe = resolve(path).recipe
    assert (recipe.draft.method, recipe.draft.model, recipe.speculation.num_speculative_tokens) == ("none", None, 0)
    assert recipe.gates.fail_if == (), "of a sweep's document"
    assert int(run(["recipe", "validate", str(path)])) == 0
    confident = [*words, "--exhaustive", "--depth-policy", "confidence", "--write-recipe", str(path), "--force"]
    assert int(run(confident)) == 0
    assert resolve(path).recipe.speculation.depth_policy == "fixed"


def test_a_trace_is_written_read_and_predicts_the_same(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profiled: list[Any] = []
    profile = sweep.profile

    def once(*arguments, **named):
        profiled[:] = profiled or [profile(*arguments, **named)]
        return profiled[0]

    monkeypatch.setattr(sweep, "profile", once)
    path = tmp_path / "t.safetensors"
    documents = []
    for read in (False, True):
        assert sweep_k("--json", "--trace", str(path)) == 0
        documents.append(checked(capsys.readouterr().out))
        assert documents[-1]["trace"]["read"] is read
    first, second = ([row["predicted"] for row in document["rows"]] for document in documents)
    assert first == second
    assert documents[0]["iid"] == documents[1]["iid"]
    for other, said in (
        (("--num-prompts", "5"), "the trace has `6` prompts, the workload `5`"),
        (("-n", "13"), "the trace was sampled with max_new_tokens `12`, not `13`"),
        (("--k-max", "6"), "was traced for at most `4` tokens, not `6`"),
    ):
        assert sweep_k("--trace", str(path), *other) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setattr(TableLM, "name", "another")
    assert sweep_k("--trace", str(path)) == 2
    assert "is of target `table`, not `another`" in capsys.readouterr().err


def test_the_tuned_recipe_reads_back(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow_target(monkeypatch)
    path = tmp_path / "tuned.yaml"
    assert sweep_k("--json", "--write-recipe", str(path), "-n", "24") == 0
    document = checked(capsys.readouterr().out)
    recipe = resolve(path).recipe
    assert recipe.speculation.num_speculative_tokens == document["recommended"]["k"] > 0
    assert recipe.as_dict()["draft"] == document["recipe"]["draft"]
    assert path.read_text().startswith("# By `specdec sweep-k`: k = ")
    assert all(len(line) <= 100 for line in path.read_text().splitlines())
    assert sweep_k("--write-recipe", str(path)) == 2
    assert "already exists" in capsys.readouterr().err
    assert sweep_k("--write-recipe", str(path), "--force") == 0


def test_nothing_is_drawn_while_a_clock_runs(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_cli.report.sweep_k import SweepView

    seen = []
    monkeypatch.setattr(
        SweepView, "show", lambda view, found, progress: seen.append(found.bench.plain_arm.engine.has_work)
    )
    assert sweep_k("--quiet") == 0
    assert seen
    assert not any(seen)


def test_what_no_trace_can_know_is_measured_or_refused(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_k("--temperature", "1", "--verify", "typical") == 2
    assert "a trace cannot replay the rule `typical`" in capsys.readouterr().err
    assert sweep_k("-d", "a/model", "--depth-policy", "confidence", "--p-min", "0.3") == 2
    assert "a trace cannot replay p_min `0.3`" in capsys.readouterr().err
    assert sweep_k("--temperature", "1", "--verify", "typical", "--exhaustive", "--json") == 0
    document = checked(capsys.readouterr().out)
    assert all(row["predicted"] is None and row["measured"] for row in document["rows"])
    assert document["trace"] is None
    assert "typical" in document["notices"][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-d", "none"], "there is no draft to sweep"),
        (["-k", "3"], "there is no option `-k`"),
        (["--fail-if", "recommended.q < 1"], "`recommended` has no `q`"),
        (["--trace", "/nowhere/t"], "the folder of `--trace /nowhere/t` does not exist"),
        (["--write-recipe", "x", "--output", "x"], "two files have the same name"),
        (["--batch-sizes", "1,x"], "`--batch-sizes 1,x` is not a list of whole numbers"),
        (["--batch-size", "0"], "`--batch-sizes 0` must be from 1 to 1024"),
        (["--batch-sizes", "1,7"], "a batch of `7` needs as many prompts, and there are `6`"),
        (["--batch-sizes", "1,4", "--set", "speculation.disable_by_batch_size=2"], "`4` should run together"),
        (["--max-regression", "5%"], "has no effect without a baseline"),
        (["--baseline", "none.json"], "baseline `none.json` cannot be read"),
        (["--set", "speculation.tree=2,1"], "no ranks of tokens"),
        (["-n", "600"], "no prompt of `builtin:mini` fits the context of `512` tokens"),
    ],
)
def test_refusals(loaded, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert sweep_k(*arguments) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert out == ""


def test_predictions_for_a_batch_are_called_approximate(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    for size, is_said in ((1, False), (3, True)):
        assert sweep_k("--json", "--batch-size", str(size)) == 0
        notices = checked(capsys.readouterr().out)["notices"]
        assert any(f"predictions at batch size {size} are approximate" in one for one in notices) is is_said


def test_gates_on_intervals(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_k("--json", "--exhaustive", "--fail-if", "rows.0.measured < 1000") == 3
    gate = checked(capsys.readouterr().out)["gates"][0]
    assert gate["value"] > 0
    assert gate["ci95"][0] <= gate["value"] <= gate["ci95"][1]
    assert sweep_k("--exhaustive", "--fail-if", "rows.0.predicted > 1000") == 0


def test_a_dry_run_loads_nothing(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_k("--dry-run", "--dataset", "some/dataset") == 0
    assert (
        "# would predict k = 1 to 4 over up to 6 prompts of some/dataset and measure the best few of them once"
        in capsys.readouterr().out
    )
    assert not loaded


def test_an_interruption_leaves_what_is_whole_and_exit_code_130(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specdec_cli.cli import measurement

    path = tmp_path / "tuned.yaml"
    for after, is_measured in ((3, False), (300, True)):

        @contextmanager
        def interrupted(after=after):
            asked = iter(range(10**9))
            yield lambda: next(asked) > after

        monkeypatch.setattr(measurement, "interruptible", interrupted)
        assert sweep_k("--json", "--repeats", "2", "--exhaustive", "--write-recipe", str(path)) == 130
        out, err = capsys.readouterr()
        document = checked(out)
        assert document["plan"]["interrupted"]
        assert bool(document["plan"]["measured_k"]) is is_measured
        assert len(document["by_batch_size"]) == 1
        assert "interrupted: these are the results so far" in err
        assert not path.exists()


def predicted(k: int, speedups: list[float], ci95: tuple[float, float]) -> Predicted:
    """Prompts, four of each speed-up, that take a second each with the draft."""
    speedups = speedups * 4
    nothing = np.zeros(len(speedups))
    speedup = Interval(float(np.median(speedups)), ci95, len(speedups))
    length = Interval(2.0, None, len(speedups))
    seconds = (np.array(speedups), nothing, nothing + 1, nothing)
    return Predicted(DraftShape(k), length, speedup, speedup, *seconds, iid_speedup=None, replayed=stand_in(None))


def test_candidates_are_few_near_the_best_and_not_clearly_slower() -> None:
    best = predicted(4, [1.0, 2.0, 3.0], (1.0, 3.0))
    apart = predicted(1, [0.5, 0.6, 0.7], (0.5, 0.7))
    slower_prompt_by_prompt = predicted(2, [0.9, 1.8, 2.7], (0.9, 2.7))
    near = [predicted(k, [1.02, 1.99 - k / 1e3, 3.01], (1.0, 3.0)) for k in (5, 6, 7, 8)]
    assert candidates([apart, slower_prompt_by_prompt, best]) == [DraftShape(4)]
    assert candidates([apart, best, *near]) == [DraftShape(4), DraftShape(5)]
    assert candidates([predicted(1, [float("nan")], (0.0, 0.0))]) == []


def test_the_best_chain_and_the_best_tree_are_measured_whatever_is_predicted() -> None:
    chains = [predicted(k, [1.0, 2.0, 3.0 + k / 9], (1.0, 3.0)) for k in (1, 2, 3)]
    slow, slower = (
        replace(predicted(2, [speedup], (speedup, speedup)), shape=DraftShape.of(TreeShape.parse(tree)))
        for tree, speedup in (("3,1", 0.7), ("2,1", 0.6))
    )
    assert candidates([*chains, slower, slow]) == [DraftShape(1), DraftShape(2), slow.shape]
    assert candidates([predicted(1, [0.2], (0.2, 0.2)), slow, slower]) == [slow.shape, DraftShape(1)]


def count_profiles(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the pair was warm, for every profile that is taken from now on."""
    profiled, profile = [], sweep.profile

    def counted(*arguments, **named):
        profiled.append(named["is_warm"])
        return profile(*arguments, **named)

    monkeypatch.setattr(sweep, "profile", counted)
    return profiled


def test_prediction_and_measurement_are_of_the_same_minutes(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine changes its pace when the first profile is done: the target takes four times as long by the row."""
    clock, score, pace = toy_clock(monkeypatch), TableLM.score, [0.0]
    slower = lambda rows: 0.002 + pace[0] * sum(row.num_logits for row in rows)  # noqa: E731
    monkeypatch.setattr(TableLM, "score", lambda self, rows: clock.sleep(slower(rows)) or score(self, rows))
    profile, in_turn = sweep.profile, []

    def then_slower(*arguments, **named):
        found = profile(*arguments, **named)
        in_turn.append(named["is_warm"])
        pace[0] = 0.002
        return found

    monkeypatch.setattr(sweep, "profile", then_slower)
    assert sweep_k("--json", "--exhaustive", "-n", "24") == 0
    document = checked(capsys.readouterr().out)
    assert in_turn == [False] + [True] * 13
    assert document["costs"]["target_seconds_by_rows"][3] == pytest.approx(0.010, rel=0.02)
    for row in document["rows"]:
        measured, predicted = row["measured"]["speedup"], row["predicted"]["speedup"]
        assert predicted == pytest.approx(measured, rel=0.05)
    assert document["recommended"]["verdict"] == "do-not-speculate", "which the first profile would have contradicted"


def test_an_interrupted_sweep_keeps_its_costs_and_its_trace(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specdec_cli.measure.bench.journal import Journal

    path, keep, num = tmp_path / "r.json", Journal.keep, [0]

    def interrupting(journal, arm, one) -> None:
        keep(journal, arm, one)
        num[0] += 1
        if num[0] == 9:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Journal, "keep", interrupting)
    assert sweep_k("--output", str(path), "--exhaustive") == 130
    first = checked(path.read_text())
    monkeypatch.setattr(traced, "trace_target", None)
    profiled = count_profiles(monkeypatch)
    assert sweep_k("--output", str(path), "--exhaustive", "--resume") == 0
    document = checked(path.read_text())
    assert (document["plan"]["resumed"], document["plan"]["passes"]) == (5, 60)
    assert first["costs"]["rounds_in_turn"] == 2
    assert document["costs"]["rounds_in_turn"] == 13, "twelve turns and the end"
    assert len(profiled) == 11, "of the journal's three none is taken again"
    assert document["trace"] == first["trace"] | {"read": True}
    assert [one.name for one in tmp_path.iterdir()] == ["r.json"]


def test_an_interrupted_sweep_of_batch_sizes_is_resumed(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specdec_cli.measure.bench.journal import Journal

    path, keep, num = tmp_path / "r.json", Journal.keep, [0]

    def interrupting(journal, arm, one) -> None:
        keep(journal, arm, one)
        num[0] += 1
        if num[0] == 66:  # the first batch size is whole, and one turn of the second
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Journal, "keep", interrupting)
    words = ["--output", str(path), "--exhaustive", "--batch-sizes", "1,3"]
    assert sweep_k(*words) == 130
    first = checked(path.read_text())
    assert [len(one["measured_k"]) for one in first["by_batch_size"]] == [4, 4]
    monkeypatch.setattr(traced, "trace_target", None)
    profiled = count_profiles(monkeypatch)
    assert sweep_k(*words, "--resume") == 0
    document = checked(path.read_text())
    assert (document["plan"]["resumed"], document["plan"]["passes"]) == (65, 60 + 20)
    assert document["by_batch_size"][0]["costs"] == first["by_batch_size"][0]["costs"]
    rounds = [one["by_batch_size"][1]["costs"]["rounds_in_turn"] for one in (first, document)]
    assert rounds[0] < rounds[1]
    assert 0 < len(profiled) < 5


def test_a_picture_and_a_page_of_batch_sizes(loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    html = tmp_path / "r.html"
    assert sweep_k("--batch-sizes", "1,2", "--html", str(html), "--json", "--quiet") == 0
    table = checked(capsys.readouterr().out)["k_by_batch"]
    text = html.read_text()
    for word in (f"--k-by-batch {table}", "Every k, batch size 2", " at batch size 2: ", "batch 1, 2"):
        assert word in text


def test_a_picture_and_a_page(loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, html = tmp_path / "r.png", tmp_path / "r.html"
    assert sweep_k("--plot", str(plot), "--html", str(html), "--json") == 0
    rows = checked(capsys.readouterr().out)["rows"]
    assert all(len(row["predicted"]["per_position_acceptance_rates"]) == row["k"] for row in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "Speed-up against k" in html.read_text()
