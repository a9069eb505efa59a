"""The standard streams of this process, and how a command waits and is interrupted."""

from __future__ import annotations

import logging
import os
import signal
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.markup import escape

from specdec_cli.cli.terminal import colourful
from specdec_cli.report import pace as pace_module
from specdec_cli.report.pace import Pace
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
        is_shared=sys.stdout.isatty(),
        is_quiet=is_quiet,
    )


def _console_options() -> dict[str, Any]:
    if colourful(sys.stderr):
        return {"force_terminal": True}
    width = None if wraps(sys.stderr) else _PLAIN_WIDTH
    return {"force_terminal": False, "no_color": True, "color_system": None, "width": width}


def _is_pipe() -> bool:
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError):
        return True
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


@contextmanager
def progress(screen: Screen) -> Iterator[Callable[[str], None]]:
    """Takes words about what is being waited for: with a spinner on a terminal, elsewhere a line every 15 seconds.

    What the package logs meanwhile, such as a first compilation, becomes a line anywhere.
    """
    with _logged(screen):
        if screen.is_quiet:
            yield lambda _: None
        elif colourful(sys.stderr):
            pace = Pace()
            with screen.console.status("") as status:
                yield lambda text: status.update(f"[dim]{escape(text)} ({pace.words()})")
        else:
            with _lines(screen) as say:
                yield say


@contextmanager
def _lines(screen: Screen) -> Iterator[Callable[[str], None]]:
    """Say every 15 seconds what is being waited for, from a thread: a model loads in one long call."""
    words, ended, pace = deque([""], maxlen=1), threading.Event(), Pace()

    def run() -> None:
        while not ended.wait(pace_module.SECONDS_BETWEEN_LINES):
            screen.say(f"{words[-1] or 'working'} ({pace.words()})")

    thread = threading.Thread(target=run, name="progress lines", daemon=True)
    thread.start()
    try:
        yield words.append
    finally:
        ended.set()
        thread.join()


@contextmanager
def _logged(screen: Screen) -> Iterator[None]:
    """Say what the package logs."""
    logger, handler, level = logging.getLogger("specdec_cli"), _Said(screen), logging.getLogger("specdec_cli").level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Said(logging.Handler):
    """Says records on a screen."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.say(record.getMessage())


@contextmanager
def interruptible(repeatedly: bool = False) -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C end the work between two steps, with what there is; a second one ends it at once.

    Args:
        repeatedly: further ones are as the first.

    Yields:
        Whether Ctrl-C was pressed.
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
    try:
        yield interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, before)
