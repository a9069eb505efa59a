"""Dry runs accept and refuse what the runs do, and say the same about the rows of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec_cli.cli.main import run

COMMANDS = {
    "generate": ["generate"],
    "bench": ["bench"],
    "sweep-k": ["sweep-k"],
    "compare-drafts": ["compare-drafts", "-d", "builtin:draft", "-d", "ngram"],
    "audit": ["audit"],
    "train-draft": ["train-draft", "--num-held-out", "1"],
}
"""Commands with prompts, as a user begins them."""
DRY = [name for name in COMMANDS if name != "audit"]
MEASURING = ["bench", "sweep-k", "compare-drafts"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "one"}, {"prompt": ""}, {"messages": []}, {"prompt": "two"}, {"prompt": "three"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", ["a" * 260, "prompts", "rows.josnl", "mt-bench", "builtin:mini", "nobody/rows"])
@pytest.mark.parametrize("command", COMMANDS)
def test_b12_a_prompt_file_that_is_not_there_is_named(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*COMMANDS[command], "--prompt-file", name]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: prompt file `")
    assert name in err
    assert "cannot be read: " in err


@pytest.mark.parametrize("command", DRY)
def test_b12_a_file_with_the_name_of_a_data_set_is_a_file(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mt-bench").write_text("one\ntwo\nthree\n")
    assert run([*COMMANDS[command], "--prompt-file", "mt-bench", "--dry-run", "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    section, key = ("train", "data") if command == "train-draft" else ("workload", "dataset")
    assert found["recipe"][section][key] == "./mt-bench"


@pytest.mark.parametrize("command", DRY)
def test_b12_a_dry_run_says_how_many_rows_are_left_out(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*COMMANDS[command], "--prompt-file", "rows.jsonl", "--dry-run"]) == 0
    assert "note: 2 rows without a prompt" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "run"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch-size", "9"], "a batch of `9` needs as many prompts, and there are `3`"),
        (["--fail-if", "by_task.story.acceptance_rate < 0.5"], "by_task"),
        (["--baseline", "none.json"], "none.json"),
    ],
)
@pytest.mark.parametrize("command", MEASURING)
def test_b12_dry_runs_of_measurements_refuse_what_the_runs_do(
    command: str, words: list[str], said: str, dry: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--batch-sizes" if command == "sweep-k" and words[0] == "--batch-size" else words[0]
    assert run([*COMMANDS[command], "--dataset", "rows.jsonl", flag, *words[1:], *dry]) == 2
    assert said in capsys.readouterr().err
