"""Shared by all readers of model files: JSON objects, one-line errors, and transformers without its output."""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec_cli.errors import RunError

_AGAIN = "copy or download the model again"
MOST_PARTS = 4096
_COUNTS = frozenset(
    {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "num_nextn_predict_layers"}
)
"""Keys of a configuration that count parts, for each of which its readers make something."""


def other_shape(key: str, stored: Sequence[int], wanted: Sequence[int]) -> str:
    """Describe a tensor whose shape is not the model's."""
    return f"`{key}` has another shape, {list(stored)} instead of {list(wanted)}"


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in one of a model's files.

    Raises:
        RunError: the file cannot be read, or holds something else.
    """
    try:
        return parse_object(path, path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error


def parse_object(path: Path, content: bytes) -> dict[str, Any]:
    """The JSON object that a file holds; `path` is for messages.

    Raises:
        RunError: it holds something else.
    """
    try:
        document = json.loads(content.decode("utf-8"), object_hook=_special_float)
    except (ValueError, RecursionError) as error:
        raise unreadable(path, error) from error
    if not isinstance(document, dict):
        raise RunError(f"`{path}` cannot be read: it holds no JSON object", _AGAIN)
    return document


def _special_float(found: dict[str, Any]) -> Any:
    """The infinity or NaN that transformers writes as an object; other objects as they are."""
    named = found.get("__float__") if len(found) == 1 else None
    return float(named) if named in ("Infinity", "-Infinity", "NaN") else found


def unreadable(path: Path, error: Exception) -> RunError:
    """The error for a file that cannot be read."""
    return RunError(f"`{path}` cannot be read: {first_line(error)}", _AGAIN)


def check_counts(path: Path, content: Mapping[str, Any], further: Collection[str] = ()) -> None:
    """Refuse a configuration with more layers or heads than any model has, which would take all memory to read.

    Raises:
        RunError: a count is too large.
    """
    for key, value in _values(content):
        if (key in _COUNTS or key in further) and isinstance(value, int | float) and value > MOST_PARTS:
            message = f"`{path}` is not a valid configuration: `{key}` is `{value}`, and `{MOST_PARTS}` is the most"
            raise RunError(message, _AGAIN)


def check_flags(path: Path, content: Mapping[str, Any], flags: Collection[str]) -> None:
    """Refuse a draft's configuration that says neither true nor false where it must. Any text would be true.

    Raises:
        RunError: a flag has another value.
    """
    for key, value in _values(content):
        if key in flags and value not in (None, False, True):
            message = f"`{path}` is not a valid configuration: `{key}` is `{value}`, and must be true or false"
            raise RunError(message, "copy or download the draft again")


def _values(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values of a configuration and of those within it."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _values(value)
        else:
            yield key, value


def broken_link(path: Path) -> RunError:
    """The error for a link to a file that is not there."""
    message = f"`{path}` is a link to `{path.readlink()}`, which does not exist"
    return RunError(message, "copy or download the model again; of a hub's cache, copy `blobs` too")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' bars, warnings and reports off the terminal while something loads.

    A caller that needs transformers imports it first; this does not.
    """
    if "transformers" not in sys.modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
        return
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, without its full stop."""
    if isinstance(error, KeyError) and error.args:
        return f"unknown or missing `{error.args[0]}`"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].endswith(":") and len(lines) > 1:  # only a heading, as of transformers' checks of a configuration
        lines = [re.sub(r"^\s*\w+Error: ", "", lines[1])]
    return lines[0].strip().rstrip(".:")
