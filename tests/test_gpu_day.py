"""The GPU day's steps: a failure loses no other step, results are kept after each, and the whole script runs here."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_cli.cli.main import run

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
WAITS = "-c __import__('threading').Event().wait()"


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch):
    """The script's names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_day")


def step(day, name: str, code: str, limit: float = 60):
    """A step of Python code without blanks."""
    return day.DayStep(name, code, "", "", limit)


def ran(day, steps, folder: Path, budget: float = 100) -> dict[str, Any]:
    return day.run_day(steps, False, {"device": "NVIDIA H100 80GB"}, folder, budget)


def test_a_failure_loses_no_other_step(day, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails = "-c print('so\\x20it\\x20goes');raise(SystemExit(3))"
    writes = """-c print(1);open(r'{document}','w').write('{"k":4}')"""
    found = ran(day, [step(day, "fails", fails), step(day, "writes", writes)], tmp_path)
    kept = json.loads((tmp_path / "gpu_day_nvidia_h100_80gb.json").read_text())
    assert [one["outcome"] for one in kept["steps"]] == ["failed", "passed"]
    assert kept["steps"][0]["exit_status"] == 3
    assert kept["steps"][0]["output"] == ["so it goes"]
    assert kept["steps"][1]["document"] == {"k": 4}
    assert (tmp_path / "gpu_day_nvidia_h100_80gb.log").read_text() == "so it goes\n1\n"
    assert "    so it goes" in capsys.readouterr().out
    assert "NOT OK: fails" in day.summary(found)


def test_a_step_that_hangs_is_stopped_with_its_children(day, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(day, "_LEAST_SECONDS", 0)
    forks = f"-c __import__('subprocess').run([__import__('sys').executable,'-c',{WAITS[3:]!r}])"
    found = ran(day, [step(day, "hangs", forks, 0.5), step(day, "goes on", "-c print(1)")], tmp_path)
    assert [one["outcome"] for one in found["steps"]] == ["timed out", "passed"]


def test_a_step_gets_the_time_that_others_left(day, tmp_path: Path) -> None:
    found = ran(day, [step(day, "one", "-c print(1)", 30), step(day, "two", "-c print(1)", 30)], tmp_path)
    first, second = found["steps"]
    assert first["limit_seconds"] == 30
    assert second["limit_seconds"] == pytest.approx(60 - first["seconds"], abs=0.2)


def test_what_has_no_time_left_is_left_out_and_counts_as_wrong(day, tmp_path: Path) -> None:
    found = ran(day, [step(day, "late", "-c print(1)")], tmp_path, budget=1)
    assert found["steps"][0]["outcome"] == "left out"
    assert "NOT OK: late" in day.summary(found)


def ended(day, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", *arguments])
    with pytest.raises(SystemExit) as exit_:
        day.main()
    return exit_.value.code


@pytest.mark.parametrize(("status", "code"), [(0, 0), (5, 1)])
def test_the_exit_status_says_whether_a_step_failed(
    status: int, code: int, day, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(day, "STEPS", [step(day, "one", f"-c raise(SystemExit({status}))")])
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert ended(day, monkeypatch, "--cpu") == code
    assert (tmp_path / "out" / "gpu_day_cpu.json").is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    day, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(day, monkeypatch, "--out", str(tmp_path)) == 2
    assert "there is no GPU here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named(day, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    true_version = metadata.version

    def version(name: str) -> str:
        if name == "pydantic":
            raise metadata.PackageNotFoundError(name)
        return "1.0" if name == "rich" else true_version(name)

    assert day.missing_packages() == []
    monkeypatch.setattr(metadata, "version", version)
    assert ended(day, monkeypatch) == 2
    assert capsys.readouterr().err.startswith("missing packages: rich<16,>=14, pydantic<3,>=2.12; collect wheels")


def test_the_steps_take_nine_minutes_at_most(day) -> None:
    together = max(one.limit_seconds for one in day.STEPS if not one.is_timed)
    alone = sum(one.limit_seconds for one in day.STEPS if one.is_timed)
    assert together + alone <= day.BUDGET_SECONDS < 9 * 60


def test_what_measures_no_time_runs_together(day, tmp_path: Path) -> None:
    """Each waits for a file that another writes."""

    def waits(mine: str, other: str) -> str:
        mark, seen = (repr(str(tmp_path / name)) for name in (mine, other))
        return f"-c p=__import__('pathlib').Path;p({mark}).touch()\nwhile(not(p({seen}).exists())):pass"

    steps = [day.DayStep(name, waits(name, other), "", "", 60, is_timed=False) for name, other in ("ab", "ba")]
    assert [one["outcome"] for one in ran(day, steps, tmp_path)["steps"]] == ["passed", "passed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_forms_for_a_gpu_fail_for_want_of_one_alone(
    day, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every option of theirs is known."""
    for one in day.STEPS:
        _, *arguments = one.command(True, tmp_path / "document.json")
        if arguments[:2] == ["-m", "specdec_cli"]:
            assert run(arguments[2:]) == 1
            assert "device `cuda` is not here" in capsys.readouterr().err
        elif arguments[0] != "-m":
            monkeypatch.setattr(sys, "argv", arguments)
            with pytest.raises((SystemExit, Exception), match=r"^1$|device `cuda` is not here"):
                runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")


@pytest.mark.slow
def test_the_whole_script_runs_without_a_gpu(day, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)}
    done = subprocess.run(
        ["bash", BENCHMARKS / "gpu_day.sh", "--cpu"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "gpu_day_cpu.json").read_text())
    assert [one["outcome"] for one in kept["steps"]] == ["passed"] * len(kept["steps"])
    assert len(kept["steps"]) == len(day.STEPS)
    assert all(one["document"] for one in kept["steps"] if one["step"] not in ("rounds", "tests", "training"))
