"""A report on a standard stream: the same words in a pipe, in a file and on a terminal."""

from __future__ import annotations

import os
from typing import IO, Any, TextIO

from rich.console import Console
from rich.text import Text

from specdec_cli.report.wrapping import wrapped

_PLAIN_WIDTH = 120


class ReportConsole(Console):
    """A console whose reader may go away. The command then still finishes its work.

    On a terminal a line that is printed with `soft_wrap` wraps between words, and a command between backticks stays
    whole; elsewhere all of the line does.
    """

    def print(self, *objects: Any, soft_wrap: bool | None = None, **given: Any) -> None:
        """Print as rich's console does."""
        if soft_wrap and wraps(self.file):
            texts = [item if isinstance(item, Text) else self.render_str(str(item)) for item in objects]
            objects = (Text("\n").join(wrapped(Text(" ").join(texts), self.width)),)
        super().print(*objects, soft_wrap=soft_wrap, **given)

    def on_broken_pipe(self) -> None:
        """Write on to nowhere."""
        to_nowhere(self.file)


def wraps(stream: IO[str]) -> bool:
    """Whether a stream has a width: that of a terminal, or what `COLUMNS` says."""
    return stream.isatty() or os.environ.get("COLUMNS", "").isdecimal()


def terminal_width(stream: IO[str]) -> int:
    """Columns of a stream's terminal; `COLUMNS` wins, as in other programs, and 80 stands for an unknown width."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def to_nowhere(stream: IO[str]) -> None:
    """Discard a standard stream and its buffer, because its reader has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def open_page(stream: TextIO, colour: bool) -> Console:
    """A console for reports.

    Args:
        stream: where it writes.
        colour: whether the stream takes colour; without, a pipe gets lines of a fixed width.
    """
    if colour:
        return ReportConsole(file=stream, highlight=False, force_terminal=True)
    width = None if wraps(stream) else _PLAIN_WIDTH
    return ReportConsole(
        file=stream, highlight=False, force_terminal=False, no_color=True, color_system=None, width=width
    )
