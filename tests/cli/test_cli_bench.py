"""`bench` as a person meets it: the report, the document and the other files, gates and their exit code, refusals."""

import csv
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from schemas import assert_fits
from tiny_engine import letter_tokenizer
from tiny_models import make_tiny
from toy_engine import TableLM, toy_engine
from typed import not_none
from versions import needs_transformers

from specdec_cli.cli.main import run
from specdec_cli.cli.output import machine_of
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.garbage import leave_alone
from specdec_cli.measure.documents.bench import BenchDocument
from specdec_cli.measure.machine import machine
from specdec_cli.measure.stats import TOO_FEW


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch):
    """Engines that the command made, of toys; the real loader is not called."""
    engines = []

    def load(recipe, *, trust_remote_code: bool = False, progress=None):
        speculation = recipe.speculation
        engines.append(toy_engine(speculation.num_speculative_tokens, recipe.engine.max_num_seqs, speculation.verify))
        progress("loading [toys]")
        return engines[-1]

    monkeypatch.setattr(Engine, "from_recipe", load)
    for name in ("NO_COLOR", "CI", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return engines


def bench(*arguments: str) -> int:
    return int(run(["bench", "-d", "ngram:min=1", "-n", "12", "--num-prompts", "8", *arguments]))


def checked(text: str) -> dict[str, Any]:
    document = json.loads(text)
    assert_fits(document, BenchDocument)
    return document


@pytest.mark.parametrize("shown", [[], ["--json"]])
def test_a_reader_that_goes_away_takes_no_exit_code_along(
    loaded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shown
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    path = tmp_path / "r.json"
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert bench("--fail-if", "lossless.mismatches < 1", "--output", str(path), *shown) == 3
        monkeypatch.undo()
    assert checked(path.read_text())["gates"]
    assert list(tmp_path.iterdir()) == [path], "the journal of what is whole is gone"


def test_the_report_goes_to_stdout(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench() == 0
    out, err = capsys.readouterr()
    for word in (
        "plain",
        "draft",
        "tokens/s",
        "Lossless: all 192 tokens",
        "--details adds",
    ):
        assert word in out
    for word in ("copy-edit", "Efficiency", "draft/verify/rest"):
        assert word not in out
    assert out.count(f"note: {TOO_FEW}") == 1, "every task has one prompt"
    assert "\x1b" not in out + err
    assert "no target named: measuring the built-in builtin:target" in err


def test_49_25_details_are_what_stands_behind_the_verdict(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--details", "--repeats", "2") == 0
    out = capsys.readouterr().out
    for word in ("copy-edit", "Efficiency", "draft/verify/rest", "first: milliseconds"):
        assert word in out
    assert "--details adds" not in out
    assert out.index("ecoding") < out.index("tokens/s"), "the verdict comes first"
    assert out.index("Lossless") < out.index("Efficiency")


def test_the_document_is_the_only_thing_on_stdout(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--json", "--repeats", "3") == 0
    out, err = capsys.readouterr()
    document = checked(out)
    assert document["speedup"]["decode"]["pairs"] == 8
    low, high = document["speedup"]["decode"]["ci95"]
    assert low <= document["speedup"]["decode"]["median"] <= high
    assert document["lossless"] == {
        "promised": True,
        "verify": "greedy",
        "checked_tokens": 3 * 8 * 12,
        "mismatches": 0,
        "first_divergence": None,
    }
    assert document["efficiency"] == pytest.approx(
        document["speedup"]["decode"]["median"] / document["tokens_per_step"]
    )
    assert list(document["by_task"]) == [
        "chat", "code", "maths", "summarising", "translation", "retrieval", "story", "copy-edit",
    ]  # fmt: skip
    assert document["plan"] == {
        "batch_size": 1, "chat": False, "group_sizes": {"1": 8}, "repeats": 3, "order": "A B B A", "passes": 48,
        "interrupted": False, "resumed": 0,
    }  # fmt: skip
    assert document["plain"]["speculative"]["num_draft_tokens"] == 0
    assert document["draft"]["speculative"]["num_draft_tokens"] > 0
    assert document["roofline"] is None
    assert "with the draft" in err


def test_a_column_has_a_row_for_each_of_its_values(loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [{"prompt": "Once upon a time", "level": n % 2} for n in range(4)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ("--prompt-file", str(tmp_path / "p.jsonl"), "--repeats", "1", "--by", "level")
    assert bench(*words, "--output", str(tmp_path / "o.json"), "--plot", str(tmp_path / "o.svg")) == 0
    cells = [line.split() for line in capsys.readouterr().out.splitlines()]
    head, *lines = [row for row in cells if row and row[0] in ("level", "0", "1")]
    assert head[:4] == ["level", "prompts", "accepted", "length"]
    document = checked((tmp_path / "o.json").read_text())
    lengths = {name: part["draft"]["speculative"]["acceptance_length"] for name, part in document["by_task"].items()}
    assert [(line[0], line[1], line[3]) for line in lines] == [(name, "2", f"{lengths[name]:.2f}") for name in "01"]
    assert "Acceptance length by level" in (tmp_path / "o.svg").read_text()
    assert bench("--by", "topic") == 2
    assert "`--by topic`: no prompt has a topic" in capsys.readouterr().err


def test_nothing_is_drawn_while_a_clock_runs(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_cli.report.bench import BenchView

    steps_seen = []
    show = BenchView.show

    def watched(view, found, progress) -> None:
        steps_seen.append(found.plain_arm.engine.has_work)
        show(view, found, progress)

    monkeypatch.setattr(BenchView, "show", watched)
    assert bench("--quiet") == 0
    assert len(steps_seen) == 2 + 32 + 1
    assert not any(steps_seen)


@pytest.mark.usefixtures("nothing_frozen")
def test_collections_leave_out_what_loading_brought(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_cli.engine.garbage.leave_alone", leave_alone)
    assert bench() == 0
    assert gc.get_freeze_count() > 10_000


def test_the_other_files(loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = {name: tmp_path / f"r.{name}" for name in ("markdown", "csv", "junit")}
    flags = [word for name, path in names.items() for word in (f"--{name}", str(path))]
    assert bench(*flags, "--fail-if", "lossless.mismatches > 0", "--output", str(tmp_path / "r.json")) == 0
    checked((tmp_path / "r.json").read_text())
    text = names["markdown"].read_text()
    assert "| plain |" in text
    assert "| passed | lossless.mismatches > 0 |" in text
    rows = list(csv.DictReader(names["csv"].read_text().splitlines()))
    assert [(row["task"], row["arm"]) for row in rows[:3]] == [
        ("", "with the draft"), ("", "without a draft"), ("chat", "with the draft"),
    ]  # fmt: skip
    assert float(rows[0]["speedup_decode"]) > 0, "the draft's speed-up is in the draft's row"
    assert rows[1]["speedup_decode"] == rows[1]["draft_over_arm"] == ""
    lines = {
        line.split("|")[1].strip(): line.split("|")[6:10:3]
        for line in text.splitlines()
        if line.startswith(("| plain", "| draft"))
    }
    assert all("×" in cell for cell in lines["draft"])
    assert [cell.strip() for cell in lines["plain"]] == ["–", "–"]
    suite = ElementTree.parse(names["junit"]).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "0")
    assert bench(*flags) == 2
    assert "already exists" in capsys.readouterr().err
    assert bench(*flags, "--force") == 0


def test_a_crossed_gate_is_exit_code_3_after_everything_was_written(
    loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, junit = tmp_path / "r.json", tmp_path / "r.xml"
    code = bench(
        "--fail-if", "speedup.decode < 1000", "--fail-if", "draft.speculative.acceptance_length < 1",
        "--output", str(path), "--junit", str(junit),
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 3
    assert "error: gate crossed: `speedup.decode < 1000`" in err
    assert "gate FAILED" in out
    assert "gate passed" in out
    assert [gate["passed"] for gate in checked(path.read_text())["gates"]] == [False, True]
    assert ElementTree.parse(junit).getroot().get("failures") == "1"


def test_a_baseline(loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    assert bench("--output", str(path)) == 0
    old = json.loads(path.read_text())
    assert bench("--baseline", str(path), "--max-regression", "90%") == 0
    assert "the baseline was measured differently" not in capsys.readouterr().out
    (tmp_path / "other.json").write_text(json.dumps(old | {"plan": old["plan"] | {"batch_size": 2, "chat": True}}))
    assert bench("--baseline", str(tmp_path / "other.json"), "--max-regression", "90%") == 0
    said = "note: the baseline was measured differently: batch_size 2, here 1; chat true, here false"
    assert said in capsys.readouterr().out
    for figure in old["speedup"].values():
        figure["median"], figure["ci95"] = 1000, [990, 1010]
    path.write_text(json.dumps(old))
    assert bench("--baseline", str(path), "--json") == 3
    document = checked(capsys.readouterr().out)
    assert [gate["expression"] for gate in document["gates"]] == [
        "speedup.decode / baseline < 0.95", "speedup.latency / baseline < 0.95",
    ]  # fmt: skip


def test_a_broken_promise_is_seen(loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A target whose rows depend on how many are scored together: the planted fault that the check is for."""
    score = TableLM.score

    def uneven(self, rows):
        logits = score(self, rows)
        return logits.roll(1, dims=-1) if len(logits) > 3 else logits

    monkeypatch.setattr(TableLM, "score", uneven)
    assert bench("--json", "--fail-if", "lossless.mismatches > 0") == 3
    document = checked(capsys.readouterr().out)
    assert document["lossless"]["mismatches"] > 0
    assert bench() == 0
    assert "DIFFER from the target's own" in capsys.readouterr().out
    assert bench("--json", "--no-lossless-check") == 0
    assert json.loads(capsys.readouterr().out)["lossless"]["checked_tokens"] is None


def test_sampled_tokens_are_not_compared(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--temperature", "1", "--json") == 0
    lossless = checked(capsys.readouterr().out)["lossless"]
    assert (lossless["promised"], lossless["verify"], lossless["checked_tokens"]) == (True, "block", None)
    assert bench("--temperature", "1", "--verify", "typical") == 0
    assert "Lossless: no (--verify typical" in capsys.readouterr().out


def test_typical_at_temperature_zero_promises_what_greedy_does(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--verify", "typical", "--json") == 0
    lossless = checked(capsys.readouterr().out)["lossless"]
    assert (lossless["promised"], lossless["verify"], lossless["mismatches"]) == (True, "typical", 0)
    assert lossless["checked_tokens"] > 0


def test_a_batch(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--batch-size", "3", "--num-prompts", "16", "--tasks", "chat,code", "--json") == 0
    document = checked(capsys.readouterr().out)
    assert document["workload"]["tasks"] == {"chat": 6, "code": 6}
    assert document["speedup"]["decode"]["pairs"] == 4
    assert document["plan"]["group_sizes"] == {"3": 4}
    assert loaded[0].options.max_num_seqs == 8
    for found in document["by_task"].values():
        assert found["draft"]["speculative"]["acceptance_rate"] > 0
        assert found["speedup"]["decode"]["median"] is None
        assert found["plain"]["timing"]["decode_s"] is None
    assert any("by task the acceptance is known, times and speed-ups are not" in one for one in document["notices"])
    assert bench("--batch-size", "2", "--tasks", "chat", "--num-prompts", "6", "--json") == 0
    document = checked(capsys.readouterr().out)
    assert document["by_task"]["chat"]["speedup"]["decode"]["pairs"] == 3
    assert document["notices"] == [TOO_FEW]


def test_the_document_says_what_ran_where_the_recipe_was_too_small(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--batch-size", "12", "--num-prompts", "12", "--set", "engine.enable_prefix_caching=true")
    assert bench(*words, "--json", "--quiet") == 0
    document = checked(capsys.readouterr().out)
    assert loaded[0].options.max_num_seqs == document["recipe"]["engine"]["max_num_seqs"] == 12
    assert not document["recipe"]["engine"]["enable_prefix_caching"]
    assert any("max_num_seqs is 12 here, not 8" in one for one in document["notices"])
    assert any("prefix caching is off here" in one for one in document["notices"])


def test_no_arm_finds_a_prompt_in_the_cache(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A real cache, which the loader would leave on: every arm feeds every prompt whole."""
    from specdec_cli.events import Stepped
    from specdec_cli.measure.bench.passes import Track

    folder = make_tiny("llama", tmp_path / "target", 0)
    letter_tokenizer().save_pretrained(folder)
    prompts = tmp_path / "p.txt"
    prompts.write_text("the cat sat on the old hat and the cat sat on the mat\n" * 2)
    cached, add = [], Track.add

    def watched(track, one) -> None:
        cached.extend(
            e.num_cached_tokens for event in one.run.events if isinstance(event, Stepped) for e in event.emitted
        )
        add(track, one)

    words = ["-t", str(folder), "-d", "ngram", "-n", "4", "--dataset", str(prompts), "--quiet", "--repeats", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Track, "add", watched)
        assert int(run(["bench", *words, "--set", "engine.enable_prefix_caching=true"])) == 0
    assert "prefix caching is off here" in capsys.readouterr().out
    assert set(cached) == {0}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-k", "0"], "there is no draft to measure"),
        (["-d", "none"], "there is no draft to measure"),
        (["--dataset", "nothing.jsonl"], "there is no data set `nothing.jsonl`: no such file"),
        (["--dataset", "data/nothing.jsonl"], "there is no data set `data/nothing.jsonl`: no such file"),
        (["--batch-size", "9"], "a batch of `9` needs as many prompts, and there are `8`"),
        (["--batch-size", "2", "--fail-if", "by_task.chat.speedup.decode < 1"], "needs the times of one task"),
        (["--tasks", "codes"], "no prompt has the task `codes`"),
        (["--against", "vllm"], "`--against vllm` is not a plain arm"),
        (["--against", "transformers", "--temperature", "1"], "decodes greedily and without `sampling.temperature`"),
        (["--against", "transformers-assisted"], "needs a draft model, and the draft is `ngram`"),
        (["--fail-if", "speedup.decode"], "must be PATH OP NUMBER"),
        (["--fail-if", "speedup.decod < 1"], "`speedup` has no `decod`"),
        (["--fail-if", "by_task.poems.speedup.decode < 1"], "`by_task` has no `poems`"),
        (
            ["--fail-if", "speedup.decode < 1", "--num-prompts", "1", "--repeats", "1"],
            "takes 2 pairs (prompts, or batches of them)",
        ),
        (["--fail-if", "by_task.code.speedup.decode < 1", "--num-prompts", "8", "--repeats", "1"], "there would be 1"),
        (["--set", "speculation.disable_by_batch_size=2", "--batch-size", "4"], "does not speculate beyond `2`"),
        (["--k-by-batch", "1:4,4:0", "--batch-size", "4"], "k_by_batch has no draft where `4` sequences run together"),
        (["--max-regression", "5%"], "has no effect without a baseline"),
        (["--baseline", "none.json", "--max-regression", "5"], "must be a percentage"),
        (["--baseline", "none.json"], "baseline `none.json` cannot be read"),
        (["--csv", "/nowhere/r.csv"], "the folder of `--csv /nowhere/r.csv` does not exist"),
        (["--csv", "r.x", "--junit", "r.x"], "two files have the same name"),
        (["-n", "600"], "no prompt of `builtin:mini` fits the context of `512` tokens"),
    ],
)
def test_refusals(loaded, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert bench(*arguments) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert out == ""


def test_the_assistant_takes_one_prompt_at_a_time(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "-d", "some/draft", "--against", "transformers-assisted", "--batch-size", "2"]
    assert int(run(arguments)) == 2
    assert "takes one prompt at a time, not `2`" in capsys.readouterr().err


def test_a_dry_run_loads_nothing(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--dry-run", "--against", "transformers", "--dataset", "some/dataset") == 0
    out = capsys.readouterr().out
    assert "# would measure up to 8 prompts of some/dataset, 2 times in each arm" in out
    assert bench("--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_prompts"] == 8
    assert not loaded


@needs_transformers("batches continuously in another way")
def test_transformers_beside_our_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The whole way with real checkpoints: all arms give the same tokens, and the roofline is there."""
    for name, seed in (("target", 0), ("draft", 1)):
        folder = make_tiny("llama", tmp_path / name, seed)
        letter_tokenizer().save_pretrained(folder)
    prompts = tmp_path / "p.txt"
    prompts.write_text("the cat\nan old hat\n")
    arguments = ["-t", str(tmp_path / "target"), "-d", str(tmp_path / "draft"), "-n", "8", "--dataset", str(prompts)]
    others = "none,transformers,transformers-assisted,transformers-cb"
    assert int(run(["bench", *arguments, "--json", "--against", others])) == 0
    document = checked(capsys.readouterr().out)
    assert list(document["against"]) == ["transformers", "transformers-assisted", "transformers-cb"]
    for peer in document["against"].values():
        assert (peer["equal"]["checked_tokens"], peer["equal"]["mismatches"]) == (32, 0)
        assert peer["speedup"]["decode"]["pairs"] == 2
    assert document["by_task"] == {}
    assert document["roofline"]["plain"]["bound"] in ("memory", "compute")
    assert document["roofline"]["verify"]["tokens_per_step"] > document["roofline"]["plain"]["tokens_per_step"] == 1.0


def test_unequal_precision_is_said_wherever_the_other_engine_stands(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specdec_cli.engine.arms import EngineArm
    from specdec_cli.measure.bench import against

    class Peer(EngineArm):
        peer = type("Named", (), {"version": "1"})

    def load(names, *_):
        return [Peer(name, toy_engine(), 0) for name in names]

    monkeypatch.setattr(against, "load_peers", load)
    path, said = tmp_path / "r.md", "not at equal precision: specdec runs the target in int8, transformers unquantized"
    words = ("--against", "transformers", "--markdown", str(path), "--force")
    assert bench(*words, "--quantize", "int8", "--output", str(tmp_path / "r.json")) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert any(said in one for one in checked((tmp_path / "r.json").read_text())["notices"])
    assert said in path.read_text()
    assert bench(*words) == 0
    assert "equal precision" not in capsys.readouterr().out + path.read_text()


def test_the_assistants_precision_counts_too() -> None:
    from specdec_cli.measure.bench.against import unequal_precision
    from specdec_cli.recipe import resolve

    recipe = resolve(sets=["draft.quantize=int8"]).recipe
    assert unequal_precision(("transformers",), recipe) is None
    assert "runs the draft in int8" in not_none(unequal_precision(("transformers", "transformers-assisted"), recipe))
    assert unequal_precision((), recipe) is None


def test_workload_and_gates_come_from_a_recipe_too(loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "draft: {method: ngram, min: 1}\nsampling: {max_new_tokens: 6}\n"
        "workload: {dataset: builtin:stories, tasks: [animals], num_prompts: 6}\n"
        'gates: {fail_if: ["speedup.decode < 1000"]}\n'
    )
    assert int(run(["bench", "--recipe", str(recipe), "--json"])) == 3
    document = checked(capsys.readouterr().out)
    assert document["workload"]["tasks"] == {"animals": 6}
    assert document["recipe"]["gates"]["fail_if"] == ["speedup.decode < 1000"]


def test_an_interruption_leaves_a_document_and_exit_code_130(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import contextmanager

    from specdec_cli.cli import measured_run

    @contextmanager
    def interrupted(after: int):
        asked = iter(range(10**9))
        yield lambda: next(asked) > after

    for after, passes in ((400, True), (3, False)):
        monkeypatch.setattr(measured_run, "interruptible", lambda after=after: interrupted(after))
        assert bench("--json", "--fail-if", "speedup.decode < 1000") == 130
        out, err = capsys.readouterr()
        assert bool(out) is passes
        assert "interrupted" in err
        assert not passes or checked(out)["plan"]["interrupted"]


def test_an_interruption_after_the_last_pass_changes_nothing(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from contextlib import contextmanager

    from specdec_cli.cli import measured_run

    is_done = [False]
    document = measured_run.ComparedRun.document

    def late(*given):
        is_done[0] = True
        return document(*given)

    @contextmanager
    def interrupted():
        yield lambda: is_done[0]

    monkeypatch.setattr(measured_run.ComparedRun, "document", late)
    monkeypatch.setattr(measured_run, "interruptible", interrupted)
    path = tmp_path / "r.json"
    assert bench("--output", str(path), "--fail-if", "speedup.decode < 1000") == 3
    assert "interrupted" not in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["r.json"], "no journal is left"


def test_a_picture_and_a_page(loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, html = tmp_path / "r.svg", tmp_path / "r.html"
    assert bench("--plot", str(plot), "--html", str(html), "--json") == 0
    checked(capsys.readouterr().out)
    assert b"Speed-up by task" in plot.read_bytes()
    assert "<svg" in html.read_text()
    assert bench("--plot", str(plot)) == 2
    assert "`--plot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plot", "x.pdf"], "`--plot x.pdf` must end in .png or .svg"),
        (["--plot", "x.svg", "--html", "x.svg"], "two files have the same name"),
        (["--html", "/nowhere/x.html"], "the folder of `--html /nowhere/x.html` does not exist"),
        (["--resume"], "`--resume` needs the --output FILE of the run to continue"),
    ],
)
def test_refusals_of_pictures_and_resuming(
    loaded, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert bench(*arguments) == 2
    assert said in capsys.readouterr().err
    assert not loaded


def test_without_matplotlib_nothing_is_loaded(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_cli.report import plot

    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    for flag, path in (("--plot", "x.png"), ("--html", "x.html")):
        assert bench(flag, path) == 2
        err = capsys.readouterr().err
        assert f"`{flag}` draws with matplotlib, which is not installed" in err
        assert "pip install 'specdec-cli[plots]'" in err
    assert not loaded


def test_a_document_names_the_gpu_of_either_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    engine = toy_engine()
    assert machine_of(engine)["gpu"] is None
    engine.target.device = torch.device("cuda:1")
    assert machine_of(engine)["gpu"] == "GPU 1"


def test_an_interrupted_run_is_resumed(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specdec_cli.measure.bench.passes import Track

    path, journal, csv_path = tmp_path / "r.json", tmp_path / "r.json.partial", tmp_path / "r.csv"
    add, num = Track.add, [0]

    def interrupting(track, one) -> None:
        add(track, one)
        num[0] += 1
        if num[0] == 7:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Track, "add", interrupting)
    words = ["--output", str(path), "--csv", str(csv_path)]
    assert bench(*words) == 130
    assert "interrupted: these are the results so far; --resume continues it" in capsys.readouterr().err
    assert checked(path.read_text())["plan"]["interrupted"] is True
    assert bench(*words) == 2
    path.unlink()
    csv_path.unlink()
    assert bench(*words) == 2
    assert "r.json.partial` holds the results of an interrupted run" in capsys.readouterr().err
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(machine, "cpu_model", lambda: "another processor")
        assert bench(*words, "--resume") == 2
        assert "r.json.partial` is of another machine or other libraries" in capsys.readouterr().err
    assert bench(*words, "--resume", "--repeats", "3") == 2
    assert "r.json.partial` is of another plan" in capsys.readouterr().err
    assert bench(*words, "--resume", "-n", "11") == 2
    assert "r.json.partial` is of another recipe" in capsys.readouterr().err
    assert journal.exists()
    assert bench(*words, "--resume", "--fail-if", "lossless.mismatches > 0") == 0
    document = checked(path.read_text())
    assert (document["plan"]["resumed"], document["plan"]["passes"]) == (6, 32)
    assert document["plan"]["interrupted"] is False
    assert document["lossless"]["checked_tokens"] == 2 * 8 * 12
    assert "6 of 32 passes are of an earlier, interrupted run" in document["notices"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["r.csv", "r.json"]
    assert bench(*words, "--resume") == 2
    assert "already exists" in capsys.readouterr().err, "a whole document is not overwritten"


def test_an_interrupted_document_is_overwritten_by_the_run_that_continues_it(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specdec_cli.measure.bench.journal import Journal

    path, keep, num = tmp_path / "r.json", Journal.keep, [0]

    def interrupting(journal, arm, one) -> None:
        keep(journal, arm, one)
        num[0] += 1
        if num[0] == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Journal, "keep", interrupting)
    assert bench("--output", str(path)) == 130
    assert bench("--output", str(path), "--resume") == 0
    assert checked(path.read_text())["plan"]["resumed"] == 4
    assert bench("--output", str(tmp_path / "new.json"), "--resume") == 0
    assert "nothing to resume: starting from the beginning" in capsys.readouterr().err


def test_ctrl_c_before_the_first_pass_says_so(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specdec_cli.cli.bench import BenchRun

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "r.json"
    for at, how in (("study", "; --resume continues it"), ("opened", "")):
        monkeypatch.setattr(BenchRun, at, interrupted)
        assert bench("--output", str(path), "--force") == 130
        assert capsys.readouterr().err.endswith(f"interrupted{how}\n")


def test_a_full_disk_takes_no_result_along(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specdec_cli.cli import output

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    words = ["--output", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    with monkeypatch.context() as disk:
        disk.setattr(output.os, "fsync", full)
        assert bench(*words) == 1
    out, err = capsys.readouterr()
    assert "tokens/s" in out
    assert "r.json.partial` keeps every pass" in err
    assert "--resume --force" in err
    assert bench(*words, "--resume", "--force") == 0
    assert checked((tmp_path / "r.json").read_text())["plan"]["resumed"] == 32
