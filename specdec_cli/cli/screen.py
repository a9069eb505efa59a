"""The standard streams of this process, and how a command waits and is interrupted."""

from __future__ import annotations

import logging
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from specdec_cli.cli.terminal import colourful
from specdec_cli.cli.termination import Termination
from specdec_cli.report.counting import CountingLine
from specdec_cli.report.pace import Waiting
from specdec_cli.report.page import ReportConsole, wraps
from specdec_cli.report.view import Screen

_PLAIN_WIDTH = 100


def open_screen(is_quiet: bool, streams_text: bool) -> Screen:
    """The screen of this process.

    Args:
        is_quiet: nothing but errors on standard error.
        streams_text: whether text goes to standard output while the live area is drawn. Into a pipe it then goes
            alone: the pipe's other end (`| cat`, `| head`) may be writing to this very terminal.
    """
    may_draw = colourful(sys.stderr) and not is_quiet
    return Screen(
        stdout=sys.stdout,
        stdout_colour=colourful(sys.stdout),
        console=ReportConsole(stderr=True, highlight=False, **_console_options()),
        is_live=may_draw and not (streams_text and _is_pipe()),
        is_shared=sys.stdout.isatty() or _is_one_stream(),
        is_quiet=is_quiet,
    )


def say_notices(notices: Sequence[str], is_quiet: bool) -> None:
    """Print notices on standard error."""
    screen = open_screen(is_quiet, streams_text=False)
    for notice in notices:
        screen.say(f"note: {notice}", "yellow")


def _console_options() -> dict[str, Any]:
    if colourful(sys.stderr):
        return {"force_terminal": True}
    width = None if wraps(sys.stderr) else _PLAIN_WIDTH
    return {"force_terminal": False, "no_color": True, "color_system": None, "width": width}


def _is_one_stream() -> bool:
    """Whether both standard streams end up in the same place: `2>&1`."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return False


def _is_pipe() -> bool:
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError):
        return True
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


@contextmanager
def progress(screen: Screen) -> Iterator[Waiting]:
    """Takes words about what is being waited for: with a spinner on a terminal, elsewhere a line every 15 seconds.

    What the package logs meanwhile, such as a first compilation, becomes a line anywhere.
    """
    waiting = Waiting()
    with _logged(screen.say):
        if colourful(sys.stderr) and not screen.is_quiet:
            with screen.console.status(waiting):
                yield waiting
        else:
            with CountingLine(screen, waiting.words):
                yield waiting


def start_torch(say: Callable[[str], None]) -> None:
    """Import what loads models."""
    say("starting torch and transformers")
    from specdec_cli.engine.garbage import importing_torch

    with importing_torch():
        import specdec_cli.engine.engine  # noqa: F401  # takes seconds


@contextmanager
def timed_progress(screen: Screen) -> Iterator[Waiting]:
    """Progress of work whose time is measured: a terminal shows one cheap line instead of a spinner."""
    waiting = Waiting()
    with CountingLine(screen, waiting.words) as line, _logged(line.say):
        yield waiting


@contextmanager
def _logged(say: Callable[[str], None]) -> Iterator[None]:
    """Say what the package logs."""
    logger, handler, level = logging.getLogger("specdec_cli"), _Said(say), logging.getLogger("specdec_cli").level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Said(logging.Handler):
    """Says records."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())


@contextmanager
def interruptible(repeatedly: bool = False, ends: bool = True) -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C end the work between two steps, with what there is; a second one ends it at once.

    Args:
        repeatedly: further ones are as the first.
        ends: the command ends with the work, so that SIGTERM does the same.

    Yields:
        Whether Ctrl-C was pressed, or SIGTERM came.
    """
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        interrupted.set()
        if not repeatedly:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        yield interrupted.is_set
        return
    before = signal.signal(signal.SIGINT, interrupt)
    termination = signal.getsignal(signal.SIGTERM)
    try:
        with termination.stopping(interrupted.set) if ends and isinstance(termination, Termination) else nullcontext():
            yield interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, before)
