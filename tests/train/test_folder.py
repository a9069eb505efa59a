"""The output folder of a run: one run at a time, and no file deleted that a run did not write."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_cli.errors import RunError, UsageError
from specdec_cli.train.disk import replace_text, writing
from specdec_cli.train.folder import TrainingFolder

PLAN = {"data": "abc", "sampling": {"seed": 17, "temperature": 0.5}, "learning_rate": None}
HOLD = "\n".join(
    [
        "import sys, pathlib",
        "from specdec_cli.train.folder import TrainingFolder",
        "with TrainingFolder(pathlib.Path(sys.argv[1])).locked():",
        "    print('locked', flush=True)",
        "    sys.stdin.read()",
    ]
)


def begun(path: Path) -> TrainingFolder:
    folder = TrainingFolder(path)
    folder.begin(PLAN, "target: {}\n", is_resumed=False, force=False)
    return folder


def test_another_process_keeps_a_run_out_until_it_dies(tmp_path: Path) -> None:
    folder = begun(tmp_path / "head")
    words = [sys.executable, "-c", HOLD, str(folder.path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        for refused in (
            lambda: folder.check(True, False),
            lambda: folder.check(False, True),
            folder.locked().__enter__,
        ):
            with pytest.raises(UsageError, match="another `specdec train-draft` writes to") as error:
                refused()
            assert error.value.hint == "wait until it ends, or name another --output"
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        with folder.locked():
            pass
    folder.check(True, False)


def test_two_new_runs_do_not_begin_in_one_folder(tmp_path: Path) -> None:
    first, second = (TrainingFolder(tmp_path / "head") for _ in range(2))
    first.check(False, False)
    second.check(False, False)
    with first.locked():
        first.begin(PLAN, "target: {}\n", is_resumed=False, force=False)
    with second.locked(), pytest.raises(UsageError, match="already exists"):
        second.begin(PLAN, "target: {}\n", is_resumed=False, force=False)


def test_force_deletes_what_the_earlier_run_wrote_and_nothing_else(tmp_path: Path) -> None:
    folder = begun(tmp_path / "head")
    folder.claim(["config.json", "config.json.new", "medusa_lm_head.safetensors"])
    folder.claim(["config.json", "README.md"])
    (folder.work / "checkpoint").mkdir()
    own = [folder.path / "config.json", folder.path / "medusa_lm_head.safetensors", folder.path / "README.md"]
    own += [folder.answers, folder.log, folder.work / "checkpoint" / "model.safetensors"]
    others = [folder.path / "model.safetensors", folder.path / "notes.md", folder.work / "notes.txt"]
    for path in (*own, *others):
        path.write_text("text")
    folder.begin({**PLAN, "method": "medusa"}, "target: {}\n", is_resumed=False, force=True)
    assert not any(path.exists() for path in own)
    assert all(path.exists() for path in others)
    assert json.loads((folder.work / "plan.json").read_text())["method"] == "medusa"


@pytest.mark.parametrize("listed", ['["../notes.md"]', '[".."]', '["/etc/passwd"]', "{}", "[1]", '["config.json"'])
def test_a_damaged_list_of_files_deletes_nothing(listed: str, tmp_path: Path) -> None:
    folder = begun(tmp_path / "head")
    (tmp_path / "notes.md").write_text("text")
    folder.answers.write_text("hours of work")
    (folder.work / "files.json").write_text(listed)
    with pytest.raises(RunError, match=r"files\.json` is damaged"):
        folder.begin(PLAN, "target: {}\n", is_resumed=False, force=True)
    assert folder.answers.exists()
    assert (tmp_path / "notes.md").exists()


def test_force_needs_a_run_to_forget(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("text")
    for force in (False, True):
        with pytest.raises(UsageError, match="already exists"):
            TrainingFolder(tmp_path).check(False, force)


@pytest.mark.parametrize("content", ["", '{"format": "spec', "[]", "\0\0\0\0"])
def test_a_damaged_plan_is_named_and_nothing_is_lost(content: str, tmp_path: Path) -> None:
    folder = begun(tmp_path / "head")
    folder.answers.write_text("hours of work")
    (folder.work / "plan.json").write_text(content)
    for refused in (
        lambda: folder.check(True, False),
        lambda: folder.begin(PLAN, "target: {}\n", True, False),
        lambda: folder.seed,
    ):
        with pytest.raises(RunError, match=r"plan\.json` is damaged") as error:
            refused()
        assert error.value.hint is not None
        assert "restore it from a copy" in error.value.hint
    assert folder.answers.read_text() == "hours of work"


def test_a_changed_option_is_named_with_what_it_was(tmp_path: Path) -> None:
    folder = begun(tmp_path / "head")
    folder.begin(PLAN, "target: {}\n", is_resumed=True, force=False)
    for now, said in (
        ({**PLAN, "sampling": {"seed": 17, "temperature": 1.0}}, r"another `sampling\.temperature`: `0\.5`"),
        ({**PLAN, "learning_rate": 0.1}, "another `learning_rate`: `null`"),
        ({**PLAN, "data": "other"}, "its prompts have changed"),
    ):
        with pytest.raises(UsageError, match=said):
            folder.begin(now, "target: {}\n", is_resumed=True, force=False)
    assert folder.seed == 17
    with pytest.raises(UsageError, match="no training run"):
        _ = TrainingFolder(tmp_path / "none").seed


@pytest.mark.parametrize(
    ("error", "said", "hint"),
    [
        (OSError(28, "No space left on device"), "No space left on device", "free some space"),
        (OSError(122, "Disk quota exceeded"), "Disk quota exceeded", "free some space"),
        (OSError(30, "Read-only file system"), "Read-only file system", "name another folder"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 41472 vs 41360"), "No space", "free"),
        (RuntimeError("Error: I/O error: No space left on device (os error 28)\nmore"), "No space left", "free"),
    ],
)
def test_a_full_disk_is_called_full_whoever_finds_it(error: Exception, said: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"`{tmp_path}` cannot be written: {said}") as found, writing(tmp_path):
        raise error
    assert found.value.hint is not None
    assert hint in found.value.hint
    with pytest.raises(ValueError, match="other"), writing(tmp_path):
        raise ValueError("other")


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("earlier")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left"):
        replace_text(path, "later")
    assert path.read_text() == "earlier"
    assert [one.name for one in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with (
        pytest.raises(RunError, match="cannot be written: Not a directory"),
        TrainingFolder(tmp_path / "file" / "head").locked(),
    ):
        pass


def test_49_22_a_run_keeps_the_recipe_that_resume_alone_continues_with(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path / "draft")
    folder.begin(PLAN, "train: {method: medusa}\n", is_resumed=False, force=False)
    assert folder.recipe.read_text("utf-8") == "train: {method: medusa}\n"
    folder.begin(PLAN, "train: {method: pard}\n", is_resumed=True, force=False)
    assert folder.recipe.read_text("utf-8") == "train: {method: medusa}\n", "the run that is there goes on"
