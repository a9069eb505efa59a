"""SIGTERM ends a command as Ctrl-C does: with the results so far, without half-written files, by a sentence."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from specdec_cli.errors import ExitCode


class Termination:
    """The handler of SIGTERM. A second one ends the process at once.

    Attributes:
        is_received: whether the signal came.
    """

    def __init__(self) -> None:
        self.is_received = False
        self._stop: Callable[[], None] | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Stop the work in order where it can be stopped, and end it here elsewhere."""
        self.is_received = True
        signal.signal(number, signal.SIG_DFL)
        if self._stop is None:
            raise SystemExit(ExitCode.TERMINATED)
        self._stop()

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call a function, which ends the body in order, when the signal comes."""
        before, self._stop = self._stop, stop
        try:
            yield
        finally:
            self._stop = before


@contextmanager
def terminable() -> Iterator[Termination]:
    """Handle SIGTERM in the body, unless it has a handler or is ignored already."""
    termination = Termination()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield termination
        return
    signal.signal(signal.SIGTERM, termination)
    try:
        yield termination
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
