"""`compare-drafts` as a person meets it: ranks by true costs, the document, lists of drafts, gates, refusals."""

import csv
import json
import signal
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from schemas import assert_fits
from toy_clock import toy_clock
from toy_engine import END, LETTERS, LetterTokenizer, TableLM

from specdec_cli import drafters
from specdec_cli.cli import compare_drafts as command
from specdec_cli.cli.main import run
from specdec_cli.drafters.contract import Resources
from specdec_cli.engine import build
from specdec_cli.errors import UsageError
from specdec_cli.measure.bench import compare, sweep
from specdec_cli.measure.bench.passes import Track
from specdec_cli.measure.documents.compare_drafts import CompareDocument
from specdec_cli.measure.predict import traced
from specdec_cli.measure.stats import TOO_FEW

TARGET_SECONDS = 0.002
# Name to (seed of the table, seconds of a forward): the target's own table is guessed right always.
MODELS = {"good": (0, 0.0002), "bad": (5, 0.001), "expensive": (0, 0.006)}


class SlowLM(TableLM):
    """A table that takes its time, however many rows it scores."""

    def __init__(self, seed: int, seconds: float) -> None:
        super().__init__(seed)
        self.seconds = seconds

    def score(self, rows):
        time.sleep(self.seconds)
        return super().score(rows)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    """Everybody's clock."""
    return toy_clock(monkeypatch)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, clock):
    """Recipes that engines were asked for; the real loader is not called, and costs are measured in short."""
    seen = []

    def load(engine_class, recipes, *, trust_remote_code: bool = False, progress=None):
        seen.append(recipes)
        target, made = SlowLM(0, TARGET_SECONDS), []
        for recipe in recipes:
            fields = recipe.draft_fields()
            drafter = drafters.create(fields.pop("method", "model"), fields)
            drafter.load(Resources(lambda name: SlowLM(*MODELS[name]), LetterTokenizer().encode, len(LETTERS)))
            options = build.engine_options(recipe)
            made.append(engine_class(target, drafter, LetterTokenizer(), options, eos_token_ids=(END,)))
        return made

    monkeypatch.setattr(build, "engines_from_recipes", load)
    monkeypatch.setattr(compare, "_PROFILE_SECONDS", 0.0)
    monkeypatch.setattr(compare, "_MIN_PROFILE_SECONDS", 0.0)
    for name in ("NO_COLOR", "CI", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return seen


def compared(*arguments: str) -> int:
    return int(run(["compare-drafts", "-n", "13", "--num-prompts", "6", "--k-max", "3", *arguments]))


def given(*drafts: str) -> list[str]:
    return [word for draft in drafts for word in ("-d", draft)]


def checked(text: str) -> dict[str, Any]:
    document = json.loads(text)
    assert_fits(document, CompareDocument)
    return document


ALL = given("bad", "none", "expensive", "ngram:min=1", "good")


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("how", [[], ["--exhaustive", "--repeats", "1"]])
def test_drafts_are_ranked_as_their_true_costs_say(loaded, capsys: pytest.CaptureFixture[str], how) -> None:
    assert compared(*ALL, "--json", *how) == 0
    document = checked(capsys.readouterr().out)
    rows = {row["draft"]: row for row in document["rows"]}
    order = [row["draft"] for row in document["rows"]]
    assert order[0] == "good"
    assert order.index("good") < order.index("none") < order.index("expensive")
    assert order.index("none") < order.index("bad") < order.index("expensive")
    assert document["winner"] == "good"
    assert document["recommendation"].startswith("Use good with k = 3: it is ")
    assert document["speedup"]["decode"] == rows["good"]["speedup"]
    assert rows["good"]["best_k"] == 3
    assert rows["good"]["acceptance_rate"] == 1
    assert rows["expensive"]["cost_ratio"] > 1 > rows["bad"]["cost_ratio"] > rows["good"]["cost_ratio"] > 0
    assert rows["none"]["speedup"]["median"] == 1
    assert rows["none"]["best_k"] == 0
    assert rows["none"]["acceptance_rate"] is None
    assert rows["ngram:min=1"]["memory_bytes"] == rows["none"]["memory_bytes"] == 0
    assert rows["good"]["memory_bytes"] is None, "a toy's size is not known"
    assert [row["k"] for row in rows["good"]["measured"]] == ([1, 2, 3] if how else [3])
    assert len(rows["bad"]["predicted"]) == 3
    measured, predicted = rows["good"]["speedup"]["median"], rows["good"]["predicted"][2]["speedup"]["median"]
    assert predicted == pytest.approx(measured, rel=0.1)
    pairs = {(pair["a"], pair["b"]): pair for pair in document["pairwise"]}
    assert len(pairs) == 10
    assert pairs["good", "none"]["p_a_faster"] == 1
    assert pairs["good", "none"]["speedup_ratio"] == pytest.approx(measured)
    low, high = pairs["good", "expensive"]["ci95"]
    assert 1 < low <= pairs["good", "expensive"]["speedup_ratio"] <= high
    assert {found["draft"] for found in document["task_winners"].values()} == {None}, "each task has one prompt"
    assert document["lossless"]["mismatches"] == 0
    assert document["plan"]["passes"] == (6 * 13 if how else 6 * 2 * 5)
    assert [draft.get("model") for draft in document["recipe"]["draft"]] == ["bad", None, "expensive", None, "good"]


def test_the_report_goes_to_stdout(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(*given("good", "none")) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Use good with k = 3"), "the verdict comes first"
    assert len([line for line in out.splitlines() if "────" in line]) == 1, "one table"
    assert [line.split()[0] for line in out.splitlines() if line.startswith((" good", " plain"))] == ["good", "plain"]
    assert "good is fastest at k = 3; it is the largest k considered: `--k-max 6` looks further" in out
    assert "\x1b" not in out + err
    assert "comparing drafts for the built-in builtin:target" in err


def test_49_25_details_of_a_comparison_say_how_many_prompts_a_task_needs(
    loaded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(*given("good", "none"), "--details") == 0
    out = capsys.readouterr().out
    for word in ("P(A is faster)", "end to end", "predicted", "2 of 6 pairs"):
        assert word in out
    assert "undecided" not in out
    assert "Target" not in out


def test_a_batch_is_full_and_tells_no_times_by_task(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*given("good", "none"), "--batch-size", "2", "--set", "engine.max_num_seqs=1")
    words += ("--set", "engine.enable_prefix_caching=true")
    assert compared(*words, "--json", "--quiet") == 0
    document = checked(capsys.readouterr().out)
    assert document["plan"]["group_sizes"] == {"2": 3}
    good = document["rows"][0]
    assert len(document["workload"]["tasks"]) == len(good["by_task"]) == 6
    for found in good["by_task"].values():
        assert (found["acceptance_rate"], found["speedup"]["median"]) == (1, None)
    assert document["task_winners"] == {}
    assert any("by task the acceptance is known, times and speed-ups are not" in one for one in document["notices"])
    assert document["recipe"]["engine"]["max_num_seqs"] == 2
    assert {recipe.engine.max_num_seqs for recipe in loaded[0]} == {2}
    assert not any(recipe.engine.enable_prefix_caching for recipe in loaded[0])
    assert len(document["recipe"]["draft"]) == 2


def test_k_ends_where_the_synthetic_rates_do(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--exhaustive", "--set", "speculation.num_speculative_tokens=2", "--json", "--quiet"]
    assert compared(*given("good"), *words, "--synthetic-acceptance-rates", "0.8,0.5") == 0
    document = checked(capsys.readouterr().out)
    assert [one["k"] for one in document["rows"][0]["measured"]] == [1, 2]
    assert "k ends at 2, not at 3, because so many synthetic acceptance rates are given" in document["notices"]


def test_a_draft_that_is_best_at_the_largest_k_is_considered_further(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "K_MAX", 2)
    monkeypatch.setattr(command, "FURTHEST", 4)
    words = ["compare-drafts", *given("good", "expensive"), "-n", "16", "--num-prompts", "6", "--json", "--quiet"]
    assert run(words) == 0
    document = checked(capsys.readouterr().out)
    rows = {row["draft"]: row for row in document["rows"]}
    assert (document["plan"]["k_max"], rows["good"]["best_k"]) == (4, 4)
    assert {name: len(row["predicted"]) for name, row in rows.items()} == {"good": 4, "expensive": 2}
    [notice] = [one for one in document["notices"] if "larger ones were considered" in one]
    assert notice == "good: k = 2 was predicted to be best, so larger ones were considered, too"
    assert any(
        "good is fastest at k = 4; it is the largest k considered: `--k-max 8`" in one for one in document["notices"]
    )


def test_the_other_files(loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = {name: tmp_path / f"r.{name}" for name in ("markdown", "csv", "junit")}
    flags = [word for name, path in names.items() for word in (f"--{name}", str(path))]
    assert compared(*given("good", "none"), *flags, "--fail-if", "recommended < 1", "--json", "--quiet") == 2
    assert compared(*given("good", "none"), *flags, "--fail-if", "rows.0.best_k < 9", "--json", "--quiet") == 3
    document, text = checked(capsys.readouterr().out), names["markdown"].read_text()
    said = ("## specdec compare-drafts: builtin:target with good, no draft", f"**{document['recommendation']}**")
    assert all(one in text for one in (*said, "| **failed** | rows.0.best_k &lt; 9 |"))
    rows = list(csv.DictReader(names["csv"].read_text().splitlines()))
    assert [(row["task"], row["draft"]) for row in rows[:2]] == [("", "good"), ("chat", "good")]
    assert float(rows[0]["speedup_decode"]) == document["rows"][0]["speedup"]["median"]
    suite = ElementTree.parse(names["junit"]).getroot()
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == ("specdec compare-drafts", "3", "1")


def test_do_not_speculate(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(*given("expensive"), "--k-max", "1", "--json") == 0
    document = checked(capsys.readouterr().out)
    assert document["winner"] == "none"
    assert document["recommendation"].startswith("Do not speculate: no draft is certainly faster; the best, expensive")


def test_a_few_prompts_leave_it_open(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(*given("good", "none"), "--num-prompts", "1", "--repeats", "1", "--json") == 0
    document = checked(capsys.readouterr().out)
    assert document["rows"][0]["speedup"]["median"] > 1
    assert document["rows"][0]["speedup"]["ci95"] is None
    assert document["winner"] is None
    assert document["pairwise"][0]["p_a_faster"] is None
    assert document["recommendation"].startswith(
        "Inconclusive: too few pairs to be certain. The fastest, good (k = 3), is"
    )
    assert (document["verdict"], document["needs"]) == ("inconclusive", ["6 prompts or more (--num-prompts)"])
    assert document["notices"].count(TOO_FEW) == 1
    assert compared(*given("good", "none"), "--tasks", "code", "--quiet", "--details") == 0
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines() if line.strip().startswith("code")] == ["good"]
    assert compared(*given("good", "none"), "--num-prompts", "5", "--quiet", "--details") == 0
    out = capsys.readouterr().out
    assert [line.split()[-3:] for line in out.splitlines() if line.strip().startswith("code")] == [["of", "6", "pairs"]]
    assert "plain" in out
    assert not [line for line in out.splitlines() if line.split()[:1] == ["none"]]


def test_outputs_of_one_token_are_no_interruption(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(*given("good", "ngram:min=1"), "-n", "1", "--json", "--exhaustive") == 0
    out, err = capsys.readouterr()
    document = checked(out)
    assert document["recommendation"].startswith("Nothing was measured: no prompt decoded a second token")
    assert document["winner"] is None
    assert not document["plan"]["interrupted"]
    assert "interrupted" not in err
    words = ("--fail-if", "rows.good.speedup < 1", "--quiet")
    assert compared(*given("good", "none"), "-n", "1", *words) == 3
    out, err = capsys.readouterr()
    assert "`rows.good.speedup < 1`: nothing was measured" in err
    assert "nan" not in out


def test_gates_name_drafts(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = "rows.good.speedup < 1.1", "rows.ngram:min=1.speedup < 1000"
    assert compared(*given("good", "ngram:min=1"), "--fail-if", good, "--fail-if", bad, "--json") == 3
    document = checked(capsys.readouterr().out)
    assert [gate["passed"] for gate in document["gates"]] == [True, False]
    by_name = {row["draft"]: row["speedup"]["median"] for row in document["rows"]}
    assert [gate["value"] for gate in document["gates"]] == [by_name["good"], by_name["ngram:min=1"]]


def test_the_recipes_list(loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("target: {model: t}\ndraft:\n  - {model: good, dtype: float32}\n  - {method: ngram, min: 1}\n")
    assert compared("-r", str(path), "--json", "--draft-dtype", "bfloat16") == 0
    document = checked(capsys.readouterr().out)
    assert {row["draft"] for row in document["rows"]} == {"good", "ngram:min=1"}
    assert [recipe.draft.dtype for recipe in loaded[0]] == ["bfloat16", "auto"]
    assert compared("-r", str(path), "--dry-run", "--set", "draft.dtype=bfloat16") == 0
    capsys.readouterr()
    assert [recipe.target.model for recipe in loaded[0]] == ["t", "t"]
    assert compared("-r", str(path), *given("bad", "none"), "--dry-run", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["drafts"] == ["bad", "none"]
    assert document["recipe"]["draft"][0]["dtype"] == "auto"
    assert run(["recipe", "validate", str(path)]) == 0
    assert len(loaded) == 1


@pytest.mark.parametrize("command", [["generate", "x"], ["bench"], ["audit"], ["recipe", "show"]])
def test_other_commands_refuse_a_list(command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("draft: [{model: a}, {method: ngram}]\n")
    assert run([*command, "-r", str(path)]) == 2
    err = capsys.readouterr().err
    assert "r.yaml:1:8: `draft` is a list of drafts, which only `compare-drafts` takes" in err
    assert "specdec compare-drafts" in err


def test_mistakes_in_a_list_are_named_by_their_place(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("draft:\n  - {model: a, mdoel: b}\n  - {method: ngram, max: x}\n")
    assert compared("-r", str(path), "-d", "ngram") == 2
    err = capsys.readouterr().err
    assert "r.yaml:2:16: unknown key `mdoel`" in err
    assert "r.yaml:3:26: " in err
    path.write_text("draft: [{model: a}, {method: ngram}]\nsampling: {seed: no}\n")
    assert compared("-r", str(path)) == 2
    assert capsys.readouterr().err.count("`sampling.seed` must be a whole number") == 1
    path.write_text("draft: []\n")
    assert compared("-r", str(path)) == 2
    assert "r.yaml:1:8: `draft` is an empty list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (given("none"), "no draft to compare"),
        (given("good", "good"), "the draft `good` is named twice"),
        (given("good", "prediction"), "the draft `prediction` reads one prompt's text"),
        ([*given("good"), "--verify", "typical"], "cannot replay the rule `typical`"),
        ([*given("good"), "--depth-policy", "confidence", "--p-min", "0.5"], "cannot replay p_min `0.5`"),
        ([*given("good"), "--fail-if", "rows.0.speedo < 1"], "`rows.0` has no `speedo`"),
        ([*given("good"), "--max-regression", "3%"], "without a baseline"),
        ([*given("good"), "--fail-if", "rows.bad.speedup < 1"], "`rows` has no `bad`, but good, 0, 1"),
        (
            [*given("good"), "--fail-if", "rows.good.by_task.code.speedup < 1", "--num-prompts", "8", "--repeats", "1"],
            "there would be 1",
        ),
        (
            [*given("good"), "--set", "speculation.disable_by_batch_size=2", "--batch-size", "4"],
            "does not speculate beyond `2` sequences, and `4` should run together",
        ),
        ([*given("good"), "--batch-size", "7"], "a batch of `7` needs as many prompts, and there are `6`"),
        (
            [*given("good"), "--batch-size", "2", "--fail-if", "task_winners.chat.speedup < 1"],
            "needs the times of one task, and a batch of `2` holds several",
        ),
        ([*given("good"), "--trace", "/nowhere/t"], "the folder of `--trace /nowhere/t` does not exist"),
    ],
)
def test_refusals(loaded, capsys: pytest.CaptureFixture[str], arguments, words: str) -> None:
    assert compared(*arguments) == 2
    assert words in capsys.readouterr().err
    assert not loaded


def test_what_no_trace_tells_is_measured(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(*given("good"), "--exhaustive", "--verify", "typical", "--temperature", "1", "--json") == 0
    [row] = checked(capsys.readouterr().out)["rows"]
    assert row["predicted"] is None
    assert len(row["measured"]) == 3
    assert row["cost_ratio"] > 0


def test_gates(loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    assert (
        compared(*given("good", "bad"), "--k-max", "1", "--fail-if", "rows.0.speedup < 1.1", "--output", str(path)) == 0
    )
    document = checked(path.read_text())
    assert [gate["passed"] for gate in document["gates"]] == [True]
    assert compared(*given("bad"), "--k-max", "1", "--baseline", str(path), "--fail-if", "speedup.decode < 1.1") == 3
    out, err = capsys.readouterr()
    assert "gate FAILED: fail if speedup.decode < 1.1" in out
    assert err.count("gate crossed") >= 2, "the limit, and the baseline"


def test_a_trace_is_written_once_and_read_again(
    loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.safetensors"
    assert compared(*given("good"), "--trace", str(path), "--quiet") == 0
    before = path.read_bytes()
    monkeypatch.setattr(traced, "trace_target", None)
    assert compared(*given("good", "ngram"), "--trace", str(path), "--quiet") == 0
    assert path.read_bytes() == before
    monkeypatch.setattr(SlowLM, "name", "another", raising=False)
    assert compared(*given("good"), "--trace", str(path), "--json") == 2
    assert "the trace is of target `table`, not `another`" in capsys.readouterr().err


def test_a_trace_of_other_prompts_is_refused(loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    assert compared(*given("good"), "--trace", str(path), "--quiet") == 0
    assert compared(*given("good"), "--trace", str(path), "--num-prompts", "5") == 2
    assert "the trace has `6` prompts, the workload `5`" in capsys.readouterr().err


def test_dry_run_loads_nothing(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(*given("good", "ngram"), "--dry-run") == 0
    out = capsys.readouterr().out
    assert out.startswith("# would compare good, ngram: the best k up to 3 of each, 6 prompts of builtin:mini, 2 times")
    assert "\n  - {model: good," in out
    assert not loaded


def test_ctrl_c_leaves_what_is_whole(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add, num = Track.add, [0]

    def interrupting(track, one) -> None:
        add(track, one)
        num[0] += 1
        if num[0] == 7:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Track, "add", interrupting)
    assert compared(*given("good", "ngram", "none"), "--json") == 130
    out, err = capsys.readouterr()
    document = checked(out)
    assert document["plan"]["interrupted"] is True
    assert document["plan"]["passes"] == 7
    assert "interrupted: these are the results so far" in err


def test_nothing_is_drawn_while_a_clock_runs(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_cli.report.bench import BenchView

    seen = []
    monkeypatch.setattr(BenchView, "show", lambda view, bench, at: seen.append(bench.plain_arm.engine.has_work))
    assert compared(*given("good", "ngram"), "--quiet") == 0
    assert len(seen) == 3 + 3 * 12 + 1
    assert not any(seen)


def test_a_spec_reads_back() -> None:
    for spec in ("ngram", "ngram:min=1", "none", "builtin:draft", "self-int8", "self-exit:4"):
        assert drafters.to_spec(drafters.parse_spec(spec)) == spec
    with pytest.raises(UsageError):
        drafters.to_spec({"method": "no-such"})


def test_an_interrupted_comparison_is_resumed(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specdec_cli.measure.bench.journal import Journal

    path, keep, num = tmp_path / "r.json", Journal.keep, [0]

    def interrupting(journal, arm, one) -> None:
        keep(journal, arm, one)
        num[0] += 1
        if num[0] == 7:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Journal, "keep", interrupting)
    assert compared(*given("good", "ngram"), "--output", str(path)) == 130
    first = checked(path.read_text())
    for module, name in ((traced, "trace_target"), (sweep, "profile")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("what was measured is kept"))
    assert compared(*given("good", "ngram"), "--output", str(path), "--resume") == 0
    document = checked(path.read_text())
    assert (document["plan"]["resumed"], document["plan"]["passes"]) == (6, 36)
    costs = [{row["draft"]: row["cost_ratio"] for row in one["rows"]} for one in (first, document)]
    assert costs[0] == costs[1]
    assert [one.name for one in tmp_path.iterdir()] == ["r.json"]


def test_a_picture_and_a_page(loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, html = tmp_path / "r.svg", tmp_path / "r.html"
    assert compared(*given("good", "ngram", "none"), "--plot", str(plot), "--html", str(html), "--quiet") == 0
    assert b"Cost against acceptance" in plot.read_bytes()
    assert "P(A is faster)" in html.read_text()
