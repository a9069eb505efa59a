"""`sweep-k --engine vllm` against a stand-in for vLLM."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from schemas import assert_fits

from specdec_cli.cli.main import run
from specdec_cli.cli.sweep_engine import refuse_faulty
from specdec_cli.errors import RunError
from specdec_cli.measure.documents.sweep_k import SweepDocument
from specdec_cli.measure.endpoint import counters
from specdec_cli.recipe import Recipe
from specdec_cli.report.html import html
from specdec_cli.report.sweep_k import print_sweeps

FAKE = Path(__file__).parents[1] / "fake_vllm.py"
PROMPTS = ["one two three four", "a b c a b c a b c", "six of one and half", "tell me a story"]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))


def line(*words: str) -> list[str]:
    program = shlex.join([sys.executable, str(FAKE)])
    said = ["sweep-k", "--engine", "vllm", "--engine-command", program, "-t", "some/model", "-d", "ngram:min=1"]
    return [*said, "--dataset", "prompts.jsonl", "-n", "8", "--k-max", "3", "--quiet", *words]


@pytest.fixture(scope="module", autouse=True)
def _counts_at_once() -> Iterator[None]:
    """The stand-in counts before it answers, so nothing is waited for."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(counters, "_SETTLE_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The document of one sweep, and the recipe that it wrote."""
    folder = tmp_path_factory.mktemp("sweep")
    prompts, result, written = (folder / name for name in ("prompts.jsonl", "sweep.json", "tuned.yaml"))
    prompts.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    words = ["--dataset", str(prompts), "--batch-sizes", "1,2", "--output", str(result)]
    words += ["--csv", str(folder / "sweep.csv"), "--fail-if", "recommended.k > 4"]
    assert run(line(*words, "--write-recipe", str(written))) == 0
    assert "measured_speedup" in (folder / "sweep.csv").read_text()
    return json.loads(result.read_text()), written.read_text()


@pytest.mark.slow
def test_every_k_is_predicted_and_the_best_measured(swept: tuple[dict[str, Any], str]) -> None:
    found, recipe = swept
    assert_fits(found, SweepDocument)
    engine, sweep = found["engine"], found["engine_sweep"]
    assert sweep["starts"] == [0, 1, 3, 2]
    assert (engine["name"], engine["acceptance_from"]) == ("vllm", "answers")
    assert engine["version"] == "0.33.0"
    assert list(engine["commands"]) == ["without a draft", "k = 1", "k = 3", "k = 2"]
    assert all("--no-enable-prefix-caching" in command for command in engine["commands"].values())
    assert sweep["speculative_config"]["num_speculative_tokens"] == 3
    assert sweep["source"]["requests"] == len(PROMPTS) == found["trace"]["prompts"]
    assert sweep["rule"] == "greedy"
    assert found["plan"]["order"] == "A A B B"
    assert found["plan"]["passes"] == 4 * (4 + 2)
    assert [gate["passed"] for gate in found["gates"]] == [True]
    for size in found["by_batch_size"]:
        assert [row["k"] for row in size["rows"]] == [1, 2, 3]
        lengths = [row["measured"]["acceptance_length"] for row in size["rows"]]
        assert lengths[0] == 1 < lengths[1] < lengths[2], "the stand-in accepts all but a step's last token"
    assert [costs["fitted_on"] for costs in sweep["costs"]] == [[1, 3], [1, 3]]
    assert [list(costs["error"]) for costs in sweep["costs"]] == [["1", "3", "2"]] * 2
    assert "By `specdec sweep-k`" in recipe
    assert "enable_prefix_caching" not in recipe, "that is the measurement's own setting"


def test_the_report(swept: tuple[dict[str, Any], str]) -> None:
    page = Console(file=StringIO(), width=200)
    print_sweeps(page, swept[0], details=True)
    shown = page.file.getvalue()  # type: ignore[attr-defined]
    assert "ngram:max=4,min=1 under the engine's rule greedy, started at k = 0, 1, 3, 2; trace: 4 requests" in shown
    assert "with k drafted tokens" in shown
    assert "Predicted speed-ups differ from measured ones by" in shown
    assert "vLLM 0.33.0 decoded" in shown
    assert "Every k, batch size 2" in html(swept[0])


def test_a_plan_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line("--dry-run")) == 0
    out = capsys.readouterr().out
    assert "# would predict k = 1 to 3 over 4 prompts of prompts.jsonl from three starts:" in out
    assert "without a draft: " in out
    assert '"num_speculative_tokens": 3' in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tree", "2,1"], "`--tree` has no effect with --engine vllm"),
        (["--exhaustive"], "`--exhaustive` has no effect with --engine vllm"),
        (["--fail-if", "k < 2"], "no `k`"),
        (["--temperature", "0.5"], "predict at --temperature 0 or 1"),
        (["-d", "none"], "there is no draft to sweep"),
        (["--resume", "--output", "x.json"], "`--resume` has no effect with --engine vllm"),
        (["--max-regression", "5%"], "no effect without a baseline"),
    ],
)
def test_what_has_no_meaning_there_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert run(line(*words)) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_exists_is_refused_before_the_first_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "seen=seen")
    words = line("--k-max", "1")
    Path("tuned.yaml").write_text("")
    assert run([*words, "--write-recipe", "tuned.yaml"]) == 2
    assert "`--write-recipe tuned.yaml` already exists" in capsys.readouterr().err
    assert run([*words, "--write-recipe", "new", "--output", "new"]) == 2
    assert "two files have the same name" in capsys.readouterr().err
    assert not Path("seen").exists()


def test_an_engine_that_ends_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("FAKE_VLLM", "crash=4")
    assert run(line("--k-max", "1")) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "vLLM ended while it was needed (killed by SIGKILL): torch.OutOfMemoryError: no room left" in said
    assert "no room left" in Path(said.split("its whole log is in ")[1].strip()).read_text()


def test_a_build_that_does_not_sample_from_the_target_is_refused() -> None:
    sampled = Recipe.model_validate({"engine": {"name": "vllm"}, "sampling": {"temperature": 1}})
    with pytest.raises(RunError, match="uninitialized memory"):
        refuse_faulty(sampled, "0.32.0", is_cpu=True)
    refuse_faulty(sampled, "0.34.0", is_cpu=True)
    refuse_faulty(sampled, "0.32.0", is_cpu=False)
    refuse_faulty(Recipe.model_validate({"engine": {"name": "vllm"}}), "0.32.0", is_cpu=True)


def test_export_takes_the_measured_table(
    swept: tuple[dict[str, Any], str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document, result = deepcopy(swept[0]), tmp_path / "sweep.json"
    for size, k in zip(document["by_batch_size"], (3, 1), strict=True):
        size["recommended"] |= {"k": k, "verdict": "speculate"}
    result.write_text(json.dumps(document))
    words = ["export", "vllm", "-t", "some/model", "-d", "ngram:min=1", "--measured", str(result)]
    assert run(words) == 0
    script = capsys.readouterr().out
    assert '"num_speculative_tokens": 3' in script
    assert '"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 1048576, 1]]' in script
    assert "k ms more with k drafted tokens" in " ".join(script.replace("#", "").split())
    assert run([*words, "-k", "2"]) == 0
    assert '"num_speculative_tokens": 2' in capsys.readouterr().out, "the command line says otherwise"
