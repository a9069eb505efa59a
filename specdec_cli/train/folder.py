"""The output folder of a training run: the draft itself, and below `training/` what the run needs to continue.

A run writes to it alone, remembers which files it wrote, and deletes no others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec_cli.errors import RunError, UsageError
from specdec_cli.train.disk import replace_text, writing

_FORMAT = "specdec.training/1"
_PLAN, _FILES, _LOCK = "plan.json", "files.json", "lock"
_CONTENTS = {
    "target_weights": "the target's weights are not those that {} began with",
    "data": "the data is not what {} began with: its prompts have changed",
}
_RECIPE = "recipe.yaml"
_CHECKPOINTS = ("candidate", "checkpoint", "checkpoint.new", "checkpoint.old")
_OF_A_RUN = (_RECIPE, "answers.jsonl", "features", "log.jsonl", *_CHECKPOINTS)


class TrainingFolder:
    """The output folder.

    Attributes:
        work: folder of the run's own files.
        answers: file of the target's answers.
        log: file of the run's events.
        recipe: file of the run's recipe, which `--resume` alone continues with.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.work = path, path / "training"
        self.answers, self.log = self.work / "answers.jsonl", self.work / "log.jsonl"
        self.recipe = self.work / _RECIPE
        self._plan, self._files, self._lock = (self.work / name for name in (_PLAN, _FILES, _LOCK))

    def check(self, is_resumed: bool, force: bool) -> None:
        """Refuse, before anything is loaded, a folder in which the run cannot begin or continue.

        Raises:
            UsageError: there is a run already, none to continue, or another process writes to the folder.
            RunError: the plan of the run cannot be read.
        """
        if is_resumed:
            self._read_plan()
        else:
            self._check_free(force)
        if self._lock.exists():
            with self.locked():
                pass

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out of the folder; the system unlocks it when the process dies.

        Raises:
            UsageError: another process has locked it.
            RunError: the folder cannot be written.
        """
        from filelock import FileLock, Timeout

        with writing(self.path):
            self.work.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._lock)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                message = f"another `specdec train-draft` writes to `{self.path}`"
                raise UsageError(message, "wait until it ends, or name another --output") from None
        try:
            yield
        finally:
            lock.release()

    def begin(self, plan: Mapping[str, Any], recipe: str, is_resumed: bool, force: bool) -> None:
        """Make the folder for a new run, or check that a continued run is the same.

        Args:
            plan: everything that decides what the run does.
            recipe: the run's whole recipe, as YAML.
            is_resumed: continue the run that is there.
            force: forget an earlier run; its files are deleted, and no others.

        Raises:
            UsageError: there is a run already, none to continue, or another one.
            RunError: the folder cannot be written, or the plan of the run cannot be read.
        """
        plan = {"format": _FORMAT, **plan}
        if is_resumed:
            self._check_plan(plan)
            return
        self._check_free(force)
        if self._is_taken():
            self._clear()
        with writing(self.path):
            self.work.mkdir(parents=True, exist_ok=True)
        replace_text(self.recipe, recipe)
        replace_text(self._plan, json.dumps(plan, indent=2) + "\n")

    def claim(self, names: Iterable[str]) -> None:
        """Remember files of the output folder as the run's own, before they are written.

        Raises:
            RunError: the list cannot be read or written.
        """
        known = self._claimed()
        new = [name for name in names if name not in known]
        if new:
            replace_text(self._files, json.dumps([*known, *new], indent=2) + "\n")

    @property
    def seed(self) -> int | None:
        """Seed of the answers that the run there began with; None if its plan has none.

        Raises:
            UsageError: there is no run.
            RunError: the plan of the run cannot be read.
        """
        sampling = self._read_plan().get("sampling")
        seed = sampling.get("seed") if isinstance(sampling, dict) else None
        return seed if isinstance(seed, int) else None

    def _is_taken(self) -> bool:
        """Whether anything is there that a new run does not expect."""
        if not self.path.is_dir():
            return self.path.exists() or self.path.is_symlink()
        if any(path.name != self.work.name for path in self.path.iterdir()):
            return True
        if not self.work.is_dir():
            return self.work.exists()
        return any(path.name != _LOCK for path in self.work.iterdir())

    def _check_free(self, force: bool) -> None:
        """Refuse a folder with files, unless they are an earlier run's and may go."""
        if self._is_taken() and not (force and self._plan.is_file()):
            message = f"`--output {self.path}` already exists"
            raise UsageError(
                message, "name a new folder, continue its run with --resume, or begin it again with --force"
            )

    def _clear(self) -> None:
        """Delete what an earlier run wrote; its plan stays until another takes its place."""
        claimed = self._claimed()
        with writing(self.path):
            for path in (self.path / name for name in claimed):
                if path.is_file() or path.is_symlink():
                    path.unlink()
            for path in (self.work / name for name in _OF_A_RUN):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            self._files.unlink(missing_ok=True)

    def _claimed(self) -> list[str]:
        if not self._files.exists():
            return []
        hint = "name a new folder, or delete the draft's files and this list of them"
        names = _read_json(self._files, hint)
        if not isinstance(names, list) or not all(map(_is_name, names)):
            raise _damaged(self._files, hint)
        return names

    def _read_plan(self) -> dict[str, Any]:
        if not self._plan.exists():
            message = f"there is no training run in `{self.path}` to continue"
            raise UsageError(message, "leave --resume out to begin one")
        hint = "restore it from a copy, or begin the run again with --force, which deletes its answers too"
        plan = _read_json(self._plan, hint)
        if not isinstance(plan, dict):
            raise _damaged(self._plan, hint)
        return plan

    def _check_plan(self, plan: Mapping[str, Any]) -> None:
        earlier = self._read_plan()
        changed = [key for key in plan if earlier.get(key) != plan[key]]
        if changed and changed[0] in _CONTENTS:
            message = _CONTENTS[changed[0]].format(f"the run in `{self.path}`")
            raise UsageError(message, "restore what it began with, or begin another run in a new folder")
        if changed:
            key, value = _first_change(changed[0], earlier.get(changed[0]), plan[changed[0]])
            message = f"the run in `{self.path}` began with another `{key}`: `{value}`"
            raise UsageError(message, "give the options that it began with, or begin another run in a new folder")


def _is_name(value: Any) -> bool:
    """Whether a value names a file of the folder itself."""
    return isinstance(value, str) and Path(value).name == value != ".."


def _first_change(key: str, earlier: Any, now: Any) -> tuple[str, str]:
    """The first key that differs, of a section by its path, and the value that it had as JSON."""
    if isinstance(earlier, dict) and isinstance(now, dict):
        inner = next(name for name in {**now, **earlier} if earlier.get(name) != now.get(name))
        return f"{key}.{inner}", json.dumps(earlier.get(inner))
    return key, json.dumps(earlier)


def _read_json(path: Path, hint: str) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"`{path}` cannot be read: {error.strerror}", hint) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, hint) from error


def _damaged(path: Path, hint: str) -> RunError:
    return RunError(f"`{path}` is damaged", hint)
