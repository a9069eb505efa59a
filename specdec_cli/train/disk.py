"""Writing of a training run's files: whole or not at all, and errors of the disk in one clear sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec_cli.errors import RunError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a file or folder is written into one error.

    Raises:
        RunError: the disk is full, or the place cannot be written.
    """
    try:
        yield
    except Exception as error:
        if not (isinstance(error, OSError) or "No space left" in str(error) or "safetensors" in type(error).__module__):
            raise
        what = getattr(error, "strerror", None) or str(error).splitlines()[0]
        hint = "free some space or name another --output, then go on with --resume"
        raise RunError(f"`{path}` cannot be written: {what}", hint) from error


def replace_text(path: Path, text: str) -> None:
    """Write a file so that it has its earlier content or all of the new one, whatever happens.

    Raises:
        RunError: the disk is full, or the place cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    with writing(path):
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


def flush(folder: Path) -> None:
    """Make the disk keep all files of a folder, so that a loss of power leaves none of them short."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
