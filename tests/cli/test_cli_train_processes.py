"""`accelerate launch … specdec train-draft`: several processes train as one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import tiny_target
from torch import Tensor

from specdec_cli.cli import main

LAUNCHER = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command line without --output."""
    folder = tmp_path_factory.mktemp("target")
    target, data = tiny_target(folder / "target"), folder / "prompts.txt"
    data.write_text("".join(f"{'abcdefghij'[i]}{'klmnopqrst'[i]}a\n" for i in range(10)))
    found = ["train-draft", "-t", target, "--data", str(data), "-n", "16", "--depth", "2", "--num-held-out", "2"]
    return [*found, "--batch-size", "3", "--device", "cpu"]


def command(num: int, words: list[str]) -> list[str]:
    return [*LAUNCHER, "--num_processes", str(num), "-m", "specdec_cli", *words]


def launched(num: int, words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(num, words), capture_output=True, text=True, timeout=1200, check=False)


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "training" / "log.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == kind]


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "training" / "checkpoint" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_processes_train_as_one(words: list[str], tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    more = ["--max-steps", "4", "--evaluate-every", "2", "--cache-features", "--precision", "float32"]
    found = launched(2, [*words, *more, "--output", str(two), "--json"])
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["num_steps"] == 4, "one document"
    assert found.stderr.count("training eagle3: 8 samples of 128 tokens") == 1
    assert "arning" not in found.stderr
    assert main.run([*words, *more, "--output", str(one)]) == 0
    assert (two / "training" / "answers.jsonl").read_text() == (one / "training" / "answers.jsonl").read_text()
    for mine, other in zip(rows(two, "step"), rows(one, "step"), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert mine["num_tokens"] == other["num_tokens"]
    expected = weights(one)
    for name, weight in weights(two).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4, msg=name)


def test_further_processes_say_nothing_of_what_all_find(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main.run(words) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert main.run(words) == 2
    assert "there is no folder to write the draft into" in capsys.readouterr().err


def test_a_launcher_s_nonsense_is_one_sentence(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert main.run([*words, "--output", str(tmp_path / "head")]) == 2
    assert "the environment variable `WORLD_SIZE` is `two`" in capsys.readouterr().err
    assert not (tmp_path / "head").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num", [2, 3])
def test_an_interrupted_run_continues_with_the_same_bits(num: int, words: list[str], tmp_path: Path) -> None:
    whole, stopped, other = (tmp_path / name for name in ("whole", "stopped", "other"))
    words = [*words, "--epochs", "60", "--evaluate-every", "1000"]
    assert launched(num, [*words, "--output", str(whole)]).returncode == 0
    interrupt(num, [*words, "--output", str(stopped)], stopped)
    [saved] = rows(stopped, "checkpoint")
    assert saved["step"] == rows(stopped, "step")[-1]["step"] < 180
    subprocess.run(["cp", "-r", str(stopped), str(other)], check=True)
    assert launched(num, [*words, "--output", str(stopped), "--resume"]).returncode == 0
    expected = weights(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(stopped).items())
    assert main.run([*words, "--output", str(other), "--resume"]) == 0, "one process continues it"
    assert rows(other, "step")[-1]["step"] == 180


def interrupt(num: int, words: list[str], folder: Path) -> None:
    """Start a run, and press Ctrl-C after some steps."""
    process = subprocess.Popen(command(num, words), stderr=subprocess.PIPE, text=True, start_new_session=True)
    log = folder / "training" / "log.jsonl"
    while process.poll() is None and (not log.exists() or log.read_text().count("\n") < 5):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=600)[1]
    assert said.count("interrupted; continue with --resume") == 1, said


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_error_in_one_process_ends_all(words: list[str], tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys\n"
        "from specdec_cli.cli import main\n"
        "from specdec_cli.train.loop import TrainingRun\n"
        "def fails(*_): raise MemoryError('of this process alone')\n"
        "if os.environ['RANK'] == '1': TrainingRun._own_batch = fails\n"
        "sys.exit(main.run(sys.argv[1:]))\n"
    )
    found = subprocess.run(
        [*LAUNCHER, "--num_processes", "2", str(script), *words, "--output", str(tmp_path / "head")],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert found.returncode != 0
    assert [line for line in found.stderr.splitlines() if line.startswith("error: ")] == [
        "error: process 2 of 2: not enough memory: of this process alone"
    ]
