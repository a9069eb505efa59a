"""Errors of the disk that a training run writes to, in one clear sentence."""

from __future__ import annotations

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
