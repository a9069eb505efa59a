"""`sweep-k --batch-sizes`: a k for each, its figures, its files, its resumption."""

import json
import signal
from pathlib import Path

import pytest
from toy_sweeps import by_batch, checked, count_profiles, sweep_k, toy_engines

from specdec_cli.cli.main import run
from specdec_cli.measure.predict import traced
from specdec_cli.recipe import resolve


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch):
    """Engines that the command made, of toys."""
    return toy_engines(monkeypatch)


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
    (tmp_path / "sweep.json").write_text(json.dumps(document))
    assert run(["export", "vllm", "-d", "ngram:min=1", "--measured", str(tmp_path / "sweep.json")]) == 0
    assert "[[1, 2, 4], [3, 5, 2], [6, 1048576, 1]]" in capsys.readouterr().out
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
    summary, _, _ = out.partition("Batch size 1 ")
    assert [line.split()[:2] for line in summary.splitlines() if line.rstrip().endswith("2.00×   2.00–2.00")] == [
        ["1", "4"], ["3", "2"], ["6", "1"],
    ]  # fmt: skip


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


def test_a_recipe_s_k_beyond_the_trace_stays_without_a_predicted_table(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.getloadavg", lambda: (50.0, 50.0, 50.0))
    assert sweep_k("--k-max", "2", "--batch-sizes", "1,3", "--json", "--quiet") == 0
    document = checked(capsys.readouterr().out)
    assert (document["k_by_batch"], document["table"]) == ("1:4,3:4", None)


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
