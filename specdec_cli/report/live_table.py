"""A table that is redrawn in place on a terminal, and lines at intervals elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from specdec_cli.report.pace import Pace

_SECONDS_BETWEEN_DRAWS = 0.25


class LiveTable:
    """A live table with a line below it, drawn when its owner says so; a context manager that leaves the terminal tidy.

    Args:
        console: standard error.
        is_live: whether it may be drawn.
        say: takes the line every 15 seconds where nothing may be drawn; None drops it.
    """

    def __init__(self, console: Console, is_live: bool, say: Callable[[str], None] | None = None) -> None:
        self._say, self._pace, self._last = say, Pace(), 0.0
        live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._live = live if is_live else None

    def __enter__(self) -> Self:
        """Open the live area."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        if self._live is not None:
            self._live.stop()

    def draw(self, table: Callable[[], RenderableType], line: str) -> None:
        """Draw a table and a line below it, at most four times a second."""
        now = perf_counter()
        if self._live is None:
            if self._say is not None and self._pace.is_due():
                self._say(line)
        elif now >= self._last + _SECONDS_BETWEEN_DRAWS:
            self._live.update(Group(table(), Text(line, style="dim")), refresh=True)
            self._last = now
