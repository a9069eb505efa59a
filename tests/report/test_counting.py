"""The line that counts while requests are open."""

import io
import threading

from specdec_cli.report import counting
from specdec_cli.report.counting import CountingLine


class Terminal(io.StringIO):
    """Remembers what was written, and says when something was."""

    def __init__(self):
        super().__init__()
        self.written = threading.Event()

    def flush(self):
        self.written.set()


def test_a_line_comes_and_goes(monkeypatch):
    monkeypatch.setattr(counting, "_SECONDS_BETWEEN_LINES", 0.001)
    terminal = Terminal()
    with CountingLine(terminal, lambda: "3 of 8", is_live=True):
        assert terminal.written.wait(20)
    assert terminal.getvalue().startswith("\r\x1b[2K3 of 8\r")
    assert terminal.getvalue().endswith("\r\x1b[2K")
    assert "counting line" not in {thread.name for thread in threading.enumerate()}


def test_where_nothing_may_be_drawn_nothing_is(monkeypatch):
    monkeypatch.setattr(counting, "_SECONDS_BETWEEN_LINES", 0.0)
    terminal = Terminal()
    with CountingLine(terminal, lambda: "3 of 8", is_live=False):
        pass
    assert terminal.getvalue() == ""
