"""A report on a standard stream: the same words in a pipe, in a file and on a terminal."""

from __future__ import annotations

import os
from typing import IO, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

_PLAIN_WIDTH = 120


class Page(Console):
    """A console whose reader may go away: what is left to be done is done all the same."""

    def on_broken_pipe(self) -> None:
        """Write on to nowhere."""
        to_nowhere(self.file)


def to_nowhere(stream: IO[str]) -> None:
    """Let a standard stream, what it still holds included, go to nobody: its reader has gone."""
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
        return Page(file=stream, highlight=False, force_terminal=True)
    width = None if stream.isatty() else _PLAIN_WIDTH
    return Page(file=stream, highlight=False, force_terminal=False, no_color=True, color_system=None, width=width)


def grid(*heads: str, title: str | None = None) -> Table:
    """An empty table with these heads; none has no head line."""
    table = Table(box=box.SIMPLE_HEAD, show_header=any(heads), pad_edge=False, title=title, title_justify="left")
    for head in heads:
        table.add_column(head, overflow="fold")
    return table
