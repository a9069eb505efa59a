"""One line that counts while the clock runs, written by a thread, so that it delays nothing.

Between requests a table may be drawn; while one is open it may not, for Rich holds the interpreter for milliseconds. A
ready line holds it for some ten microseconds, four times a second, and a slow terminal keeps this thread waiting alone.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

from rich.cells import set_cell_size

from specdec_cli.report import pace
from specdec_cli.report.page import terminal_width
from specdec_cli.report.view import Screen

_SECONDS_BETWEEN_DRAWS = 0.25


class CountingLine:
    """The line; a context manager, so that it is gone from a terminal in the end.

    Args:
        screen: a terminal shows the line in place; other streams get it every 15 seconds, unless quiet.
        line: its text at this moment; called on the thread, so it only reads numbers.
    """

    def __init__(self, screen: Screen, line: Callable[[], str]) -> None:
        self._screen, self._line = screen, line
        self._ended = Event()
        self._thread = Thread(target=self._count, name="counting line", daemon=True)

    def __enter__(self) -> CountingLine:
        """Begin to count."""
        if not self._screen.is_quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wipe the line."""
        self._ended.set()
        if not self._screen.is_quiet:
            self._thread.join()
            if self._screen.is_live:
                self._draw("")

    def say(self, message: str) -> None:
        """Print a line that stays; it replaces the counting line."""
        if self._screen.is_live and not self._screen.is_quiet:
            self._draw("")
        self._screen.say(message)

    def _count(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_DRAWS if self._screen.is_live else pace.SECONDS_BETWEEN_LINES):
            if self._screen.is_live:
                self._draw(self._line())
            else:
                self._screen.say(self._line())

    def _draw(self, line: str) -> None:
        stream = self._screen.console.file
        stream.write(f"\r\x1b[2K{_cut(line, terminal_width(stream) - 1)}")
        stream.flush()


def _cut(line: str, width: int) -> str:
    """A line without what has no room; wide characters take two columns."""
    return line[:width] if line.isascii() else set_cell_size(line, width).rstrip()
