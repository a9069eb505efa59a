"""One line that counts while the clock runs, written by a thread, so that it delays nothing.

Between requests a table may be drawn; while one is open it may not, for Rich holds the interpreter for milliseconds. A
ready line holds it for some ten microseconds, four times a second, and a slow terminal keeps this thread waiting alone.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import IO

_SECONDS_BETWEEN_LINES = 0.25


class CountingLine:
    """The line, on a terminal; a context manager, so that it is gone in the end.

    Args:
        stream: the terminal.
        line: what stands there now; called on the thread, so it reads numbers and nothing more.
        is_live: whether anything may be written.
    """

    def __init__(self, stream: IO[str], line: Callable[[], str], is_live: bool) -> None:
        self._stream, self._line, self._is_live = stream, line, is_live
        self._ended = Event()
        self._thread = Thread(target=self._count, name="counting line", daemon=True)

    def __enter__(self) -> CountingLine:
        """Begin to count."""
        if self._is_live:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wipe the line."""
        self._ended.set()
        if self._is_live:
            self._thread.join()
            self._write("")

    def _count(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_LINES):
            self._write(self._line())

    def _write(self, line: str) -> None:
        self._stream.write(f"\r\x1b[2K{line}")
        self._stream.flush()
