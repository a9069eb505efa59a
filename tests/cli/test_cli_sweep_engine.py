"""`sweep-k --engine vllm` against a stand-in for vLLM."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from specdec_cli.cli.main import run
from specdec_cli.cli.sweep_engine import refuse_faulty
from specdec_cli.errors import RunError
from specdec_cli.recipe import Recipe
from specdec_cli.report.engine_sweep import print_engine_sweep, table
from specdec_cli.report.schema import read_schema

FAKE = Path(__file__).parents[1] / "fake_vllm.py"
PROMPTS = ["one two three four", "a b c a b c a b c", "six of one and half", "tell me a story"]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def line(*words: str) -> list[str]:
    program = shlex.join([sys.executable, str(FAKE)])
    said = ["sweep-k", "--engine", "vllm", "--engine-command", program, "-t", "some/model", "-d", "ngram:min=1"]
    return [*said, "--dataset", "prompts.jsonl", "-n", "8", "--k-max", "3", "--quiet", *words]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The document of one sweep, and the recipe that it wrote."""
    folder = tmp_path_factory.mktemp("sweep")
    prompts, result, written = (folder / name for name in ("prompts.jsonl", "sweep.json", "tuned.yaml"))
    prompts.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    words = ["--dataset", str(prompts), "--batch-sizes", "1,2", "--output", str(result)]
    assert run(line(*words, "--write-recipe", str(written))) == 0
    return json.loads(result.read_text()), written.read_text()


def test_every_k_is_predicted_and_the_best_measured(swept: tuple[dict[str, Any], str]) -> None:
    found, recipe = swept
    jsonschema.validate(found, read_schema("engine-sweep"), format_checker=jsonschema.FormatChecker())
    assert found["starts"] == [0, 1, 3, 2]
    assert found["engine"]["name"] == "vllm"
    assert found["engine"]["speculative_config"]["num_speculative_tokens"] == 3
    assert "--no-enable-prefix-caching" in found["engine"]["command"]
    assert found["source"]["requests"] == len(PROMPTS)
    assert found["rule"] == "greedy"
    for size in found["by_batch_size"]:
        assert [row["k"] for row in size["rows"]] == [1, 2, 3]
        assert all(row["measured"] is not None for row in size["rows"])
        assert size["rows"][0]["measured"]["fitted"]
        assert not size["rows"][1]["measured"]["fitted"]
    assert set(found["table"]) == {"k_by_batch", "vllm", "trtllm", "sglang"}
    assert "By `specdec sweep-k`" in recipe


def test_the_report(swept: tuple[dict[str, Any], str]) -> None:
    page = Console(file=StringIO(), width=200)
    print_engine_sweep(page, swept[0], details=True)
    shown = page.file.getvalue()  # type: ignore[attr-defined]
    assert "on vllm 0.33.0, under its rule greedy" in shown
    assert "drafted tokens" in shown
    assert "Predicted speed-ups differ from measured ones by" in shown


def test_a_plan_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line("--dry-run")) == 0
    assert "from three starts of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tree", "2,1"], "`--tree` has no effect with --engine vllm"),
        (["--exhaustive"], "`--exhaustive` has no effect with --engine vllm"),
        (["--fail-if", "k < 2"], "`--fail-if` has no effect with --engine vllm"),
        (["--temperature", "0.5"], "predict at --temperature 0 or 1"),
        (["-d", "none"], "there is no draft to sweep"),
        (["--csv", "x.csv"], "--output FILE writes the result"),
    ],
)
def test_what_has_no_meaning_there_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert run(line(*words)) == 2
    assert said in capsys.readouterr().err


def prompts_here() -> list[str]:
    """The prompts as a file in this folder, and the options that make a sweep over them short."""
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    return line("--k-max", "1")


def test_a_file_that_exists_is_refused_before_the_first_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "seen=seen")
    words = prompts_here()
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
    assert run(prompts_here()) == 1
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


def test_tables_of_the_engines() -> None:
    assert table({4: 2}) is None
    assert table({2: 5, 8: 2, 32: 0}) == {
        "k_by_batch": {"1": 5, "2": 5, "8": 2, "32": 0},
        "vllm": {"num_speculative_tokens_per_batch_size": [[1, 1, 5], [2, 7, 5], [8, 31, 2], [32, 2**20, 0]]},
        "trtllm": {"draft_len_schedule": {"1": 5, "7": 5, "31": 2}},
        "sglang": {
            "1": {"candidate_steps": [5]},
            "2": {"candidate_steps": [5]},
            "8": {"candidate_steps": [2]},
            "32": {"candidate_steps": [0]},
        },
    }


def test_export_takes_the_measured_table(
    swept: tuple[dict[str, Any], str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document, result = deepcopy(swept[0]), tmp_path / "sweep.json"
    for size, k in zip(document["by_batch_size"], (3, 1), strict=True):
        size["recommended"] |= {"k": k, "verdict": "speculate"}
    document["table"]["k_by_batch"] = {"1": 3, "2": 1}
    result.write_text(json.dumps(document))
    words = ["export", "vllm", "-t", "some/model", "-d", "ngram:min=1", "--measured", str(result)]
    assert run(words) == 0
    script = capsys.readouterr().out
    assert '"num_speculative_tokens": 3' in script
    assert '"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 1048576, 1]]' in script
    assert "k ms more with k drafted tokens" in " ".join(script.replace("#", "").split())
    assert run([*words, "-k", "2"]) == 0
    assert '"num_speculative_tokens": 2' in capsys.readouterr().out, "the command line says otherwise"
