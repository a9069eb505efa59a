"""Capabilities of a stream and installed versions, without heavy imports."""

from __future__ import annotations

import os
from typing import IO


def colourful(stream: IO[str]) -> bool:
    """Whether colour and cursor movement are welcome: a terminal, and no `NO_COLOR`, `CI` or dumb terminal."""
    refused = os.environ.get("NO_COLOR") or os.environ.get("CI") or os.environ.get("TERM") == "dumb"
    return not refused and stream.isatty()


def version_of(package: str) -> str | None:
    """An installed package's version from its metadata, without importing it; None where it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
