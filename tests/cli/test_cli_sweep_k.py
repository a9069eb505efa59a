"""`sweep-k` as a person meets it: the report, the document, its files, gates, refusals."""

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from toy_engine import LETTERS, LetterTokenizer, TableLM
from toy_sweeps import checked, slow_target, sweep_k, toy_engines
from typed import stand_in

from specdec_cli.cli import sweep_k as sweep_command
from specdec_cli.cli.main import run
from specdec_cli.drafters import create
from specdec_cli.drafters.contract import Resources
from specdec_cli.engine.build import engine_options
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.recipe import resolve


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch):
    """Engines that the command made, of toys."""
    return toy_engines(monkeypatch)


def test_the_report_goes_to_stdout(loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    slow_target(monkeypatch)
    assert sweep_k("-n", "24") == 0
    out, err = capsys.readouterr()
    assert out.startswith("Recommended: "), "the verdict comes first"
    for word in ("predicted", "measured", "95 %", "--details adds"):
        assert word in out
    assert "Textbook" not in out
    assert "\x1b" not in out + err
    assert sweep_k("-n", "24", "--details") == 0
    out = capsys.readouterr().out
    for word in ("Textbook: ", "textbook", "draft/verify/rest %", "Target forward of", "Published guidance: 2 to 6"):
        assert word in out


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
    assert sweep_k("--num-prompts", "24", "-n", "24", "--details") == 0
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


def test_nothing_is_drawn_while_a_clock_runs(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_cli.report.bench import BenchView

    seen = []
    monkeypatch.setattr(
        BenchView, "show", lambda view, found, progress: seen.append(found.bench.plain_arm.engine.has_work)
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


def test_a_picture_and_a_page(loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, html = tmp_path / "r.png", tmp_path / "r.html"
    assert sweep_k("--plot", str(plot), "--html", str(html), "--json") == 0
    rows = checked(capsys.readouterr().out)["rows"]
    assert all(len(row["predicted"]["per_position_acceptance_rates"]) == row["k"] for row in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "Speed-up against k" in html.read_text()


def test_49_25_a_sweep_goes_on_while_the_largest_k_is_the_best(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_target(monkeypatch)
    monkeypatch.setattr(sweep_command, "K_MAX", 2)
    monkeypatch.setattr(sweep_command, "FURTHEST", 4)
    words = ["sweep-k", "-d", "ngram:min=1", "-n", "24", "--num-prompts", "6", "--json", "--quiet"]
    assert run(words) == 0
    document = checked(capsys.readouterr().out)
    assert document["plan"]["k_max"] == 4
    assert [row["k"] for row in document["rows"]] == [1, 2, 3, 4]
    assert "k = 2 was predicted to be best, so larger ones were considered, too" in document["notices"]
    assert document["recommended"]["k"] > 2


def test_49_25_a_sweep_that_ends_at_k_max_says_that_it_is_the_largest(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_target(monkeypatch)
    assert run(["sweep-k", "-d", "ngram:min=1", "-n", "24", "--num-prompts", "6", "--k-max", "2", "--json"]) == 0
    document = checked(capsys.readouterr().out)
    assert (document["plan"]["k_max"], document["recommended"]["k"]) == (2, 2)
    assert document["recommended"]["why"].endswith("it is the largest k considered: `--k-max 4` looks further")
