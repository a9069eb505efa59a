"""The live area leaves the whole text and nothing of itself, seen through a small terminal emulator."""

import io
import re

from rich.console import Console
from rich.text import Text

from specdec_cli.report.live import LiveArea
from specdec_cli.report.pieces import Piece
from specdec_cli.report.texts import Writer


def screen_of(written: str, width: int) -> list[str]:
    """What a terminal shows of carriage returns, line erasures, cursor-ups and wrapped lines."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|.|\n|\r", written, re.S):
        if token == "\n":
            row, column = row + 1, 0
        elif token == "\r":
            column = 0
        elif token.startswith("\x1b"):
            number = int(re.sub(r"\D", "", token) or 1)
            if token.endswith("A"):
                row = max(0, row - number)
            elif token.endswith("K"):
                lines[row] = ""
        else:
            if column == width:
                row, column = row + 1, 0
            while len(lines) <= row:
                lines.append("")
            lines[row] = lines[row].ljust(column)[:column] + token + lines[row][column + 1 :]
            column += 1
        while len(lines) <= row:
            lines.append("")
    return [line.rstrip() for line in lines]


def area(stream: io.StringIO, shared: bool = True, out: io.StringIO | None = None, height: int = 10) -> LiveArea:
    console = Console(file=stream, force_terminal=True, width=20, height=height, color_system=None)
    return LiveArea(console, lambda: Text("TABLE\nFOOT"), Writer(out or stream, False), shared)


def test_lines_end_up_above_and_the_area_vanishes() -> None:
    stream = io.StringIO()
    live = area(stream)
    with live:
        live.put(Piece("Once upon"))
        live._draw()
        shown = screen_of(stream.getvalue(), 20)
        assert [line for line in shown if line] == ["Once upon", "TABLE", "FOOT"]
        live.put(Piece(" a time\nnext"))
        live._draw()
        shown = screen_of(stream.getvalue(), 20)
        assert [line for line in shown if line] == ["Once upon a time", "next", "TABLE", "FOOT"]
    assert [line for line in screen_of(stream.getvalue(), 20) if line] == ["Once upon a time", "next"]
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1


def test_a_long_line_is_wrapped_in_the_area_and_written_unbroken() -> None:
    stream, out = io.StringIO(), io.StringIO()
    live = area(stream, out=out)
    text = " ".join(f"word{i}" for i in range(30))
    with live:
        live.put(Piece(text))
        live._draw()
        shown = [line for line in screen_of(stream.getvalue(), 20) if line]
        assert shown[-2:] == ["TABLE", "FOOT"]
        assert shown[-3].endswith("word29")
        assert len(shown) <= 10
    assert out.getvalue() == text


def test_refresh_waits_between_draws() -> None:
    stream = io.StringIO()
    live = area(stream)
    with live:
        before = stream.getvalue()
        for _ in range(50):
            live.refresh()
        assert stream.getvalue().count("TABLE") <= before.count("TABLE") + 1


def test_text_for_another_file_passes_through_at_once() -> None:
    stream, out = io.StringIO(), io.StringIO()
    live = area(stream, shared=False, out=out)
    with live:
        live.put(Piece("Once"))
        assert out.getvalue() == "Once"
    assert "Once" not in stream.getvalue()


def test_an_error_inside_leaves_the_terminal_tidy() -> None:
    stream = io.StringIO()
    try:
        with area(stream) as live:
            live.put(Piece("half"))
            raise ValueError
    except ValueError:
        pass
    assert stream.getvalue().endswith("\x1b[?25hhalf")
