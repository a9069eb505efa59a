"""Writing of a training run's files: whole or not at all, and errors of the disk in one clear sentence."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec_cli.errors import RunError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CUT = ("No space left", "inline_container.cc", "PytorchStreamWriter")
"""Parts of what libraries say, torch without its cause, where the disk took no more of a file."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a file or folder is written into one error.

    Raises:
        RunError: the disk is full, or the place cannot be written.
    """
    try:
        yield
    except Exception as error:
        message = str(error).strip().split("\n")[0]
        is_cut = any(mark in message for mark in _CUT)
        if not (isinstance(error, OSError) or is_cut or "safetensors" in type(error).__module__):
            raise
        is_full = is_cut or getattr(error, "errno", None) in _FULL
        what = os.strerror(errno.ENOSPC) if is_cut else getattr(error, "strerror", None) or message
        other = "make it writable, or name another folder"
        hint = "free some space; a run continues with --resume" if is_full else other
        raise RunError(f"`{path}` cannot be written: {what}", hint) from error


def replace_text(path: Path, text: str) -> None:
    """Write a file so that it has its earlier content or all of the new one, whatever happens.

    Raises:
        RunError: the disk is full, or the place cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    with writing(path), deleted_on_error(new):
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


@contextmanager
def deleted_on_error(path: Path) -> Iterator[None]:
    """Delete what is half written, a file or a folder, if the body fails: a full disk needs the room."""
    try:
        yield
    except BaseException:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        raise


def flush(folder: Path) -> None:
    """Make the disk keep all files of a folder, so that a loss of power leaves none of them short."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
