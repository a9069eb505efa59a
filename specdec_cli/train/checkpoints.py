"""Checkpoints of a training run: each is written beside the last one and then takes its place."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from specdec_cli.train.disk import deleted_on_error, flush, writing

if TYPE_CHECKING:
    from accelerate import Accelerator

    from specdec_cli.train.folder import TrainingFolder
    from specdec_cli.train.processes import Processes


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._now, self._new, self._old = (folder / name for name in ("checkpoint", "checkpoint.new", "checkpoint.old"))

    @property
    def path(self) -> Path:
        """Folder of the last one."""
        return self._now

    def save(self, processes: Processes) -> None:
        """Write the state of everything that accelerate has prepared; an error leaves the last checkpoint as it was.

        Raises:
            RunError: the disk is full, or the folder cannot be written.
        """
        with writing(self._folder), deleted_on_error(self._new), _hushed():
            processes.from_main(lambda: shutil.rmtree(self._new, ignore_errors=True))
            processes.each(lambda: processes.accelerator.save_state(str(self._new)))
            processes.from_main(self._take_over)

    def _take_over(self) -> None:
        """Let the new checkpoint take the last one's place."""
        flush(self._new)
        if self._now.exists():  # otherwise the old one is all there is
            shutil.rmtree(self._old, ignore_errors=True)
            self._now.rename(self._old)
        self._new.rename(self._now)
        shutil.rmtree(self._old, ignore_errors=True)

    def load(self, accelerator: Accelerator) -> bool:
        """Restore the last whole checkpoint; whether there is one."""
        checkpoint = next((folder for folder in (self._now, self._old) if folder.exists()), None)
        if checkpoint is None:
            return False
        accelerator.load_state(str(checkpoint))
        return True

    def candidate_folder(self) -> Path:
        """An empty folder for a draft that is to be evaluated.

        Raises:
            RunError: it cannot be made.
        """
        folder = self._folder / "candidate"
        with writing(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        return folder

    def publish(self, candidate: Path, folder: TrainingFolder) -> None:
        """Copy a draft's files to the output folder, each as a whole.

        Raises:
            RunError: the disk is full, or the folder cannot be written.
        """
        paths = sorted(candidate.iterdir())
        folder.claim(name for path in paths for name in (path.name, f"{path.name}.new"))
        with writing(folder.path):
            for path in paths:
                half = folder.path / f"{path.name}.new"
                with deleted_on_error(half):
                    shutil.copyfile(path, half)
                    half.replace(folder.path / path.name)


@contextmanager
def _hushed() -> Iterator[None]:
    """Keep accelerate from warning that it saves weights once which two layers share."""
    logger = logging.getLogger("accelerate")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
