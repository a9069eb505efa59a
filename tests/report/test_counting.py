"""The line that counts while requests are open."""

import fcntl
import io
import os
import pty
import struct
import termios
import threading
from time import sleep

import pytest
from rich.console import Console
from typed import stand_in

from specdec_cli.report import counting, pace
from specdec_cli.report.counting import CountingLine
from specdec_cli.report.view import Screen


class Terminal(io.StringIO):
    """Remembers what was written, and says when something was."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        self.written.set()


def screen(stream: io.StringIO, is_live: bool, is_quiet: bool = False) -> Screen:
    return Screen(io.StringIO(), False, Console(file=stream, color_system=None), is_live, False, is_quiet)


def test_a_line_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_SECONDS_BETWEEN_DRAWS", 0.001)
    terminal = Terminal()
    with CountingLine(screen(terminal, is_live=True), lambda: "3 of 8"):
        assert terminal.written.wait(20)
    assert terminal.getvalue().startswith("\r\x1b[2K3 of 8\r")
    assert terminal.getvalue().endswith("\r\x1b[2K")
    assert "counting line" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("is_quiet", [False, True])
def test_where_nothing_may_be_drawn_it_is_said_now_and_then(monkeypatch: pytest.MonkeyPatch, is_quiet: bool) -> None:
    monkeypatch.setattr(pace, "SECONDS_BETWEEN_LINES", 0.01)
    stream = io.StringIO()
    with CountingLine(screen(stream, is_live=False, is_quiet=is_quiet), lambda: "3 of 8"):
        sleep(0.2)
    assert stream.getvalue().startswith("" if is_quiet else "3 of 8\n3 of 8\n")
    assert "\x1b" not in stream.getvalue()
    assert bool(stream.getvalue()) != is_quiet


@pytest.mark.parametrize(("line", "width"), [("x" * 200, 39), ("测" * 100, 38)])
def test_a_line_never_wraps(line: str, width: int) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        CountingLine(screen(stand_in(terminal), is_live=True), lambda: line)._draw(line)
        shown = os.read(ours, 4096).decode().removeprefix("\r\x1b[2K")
    os.close(ours)
    assert Console().render_str(shown).cell_len == width


def test_what_stays_takes_the_place_of_the_line() -> None:
    stream = io.StringIO()
    with CountingLine(screen(stream, is_live=True), lambda: "3 of 8") as line:
        line.say("compiled")
    assert "\r\x1b[2Kcompiled\n" in stream.getvalue()
