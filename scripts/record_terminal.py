#!/usr/bin/env python
"""Run a command in a terminal and save what the screen shows at the end as an SVG picture.

    python scripts/record_terminal.py docs/images/generate.svg specdec generate "Once upon a time" --compare

The command runs in a pseudo-terminal, so it draws its live table and its colours. Nothing is saved if it fails.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from io import StringIO
from itertools import groupby
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

_LINES = 60
_SECOND_HALF = [("", Style())]
"""The second column of a wide character."""
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_CODE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


class Terminal:
    """Screen of a terminal: what is left after the cursor movements that rich uses.

    Args:
        columns: characters in a line; longer lines wrap.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._decoder = AnsiDecoder()
        self._rows: list[list[tuple[str, Style]]] = [[]]
        self._row = self._column = 0

    def feed(self, output: str) -> None:
        """Take the output of a program."""
        start = 0
        for code in _CODE.finditer(output):
            self._write(output[start : code.start()])
            self._obey(code)
            start = code.end()
        self._write(output[start:])

    def lines(self) -> list[Text]:
        """The lines of the screen, without empty ones at the end."""
        lines = [_line(row) for row in self._rows]
        while lines and not lines[-1].plain.strip():
            lines.pop()
        return lines

    def _write(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self._down()
            elif character == "\r":
                self._column = 0
            else:
                self._put(character, cell_len(character))

    def _put(self, character: str, width: int) -> None:
        """Draw a character: a wide one fills two columns, one of no width joins the character before it."""
        if not width and not self._column:
            return
        if self._column + width > self._columns:
            self._down()
            self._column = 0
        row = self._rows[self._row]
        row += [(" ", Style())] * (self._column + width - len(row))
        if width:
            self._clear_halves(row, self._column, self._column + width)
            row[self._column : self._column + width] = [(character, self._decoder.style), *_SECOND_HALF[: width - 1]]
        else:
            place = max(i for i in range(self._column) if row[i] != _SECOND_HALF[0])
            row[place] = (row[place][0] + character, row[place][1])
        self._column += width

    @staticmethod
    def _clear_halves(row: list[tuple[str, Style]], begin: int, end: int) -> None:
        """Clear the halves that stay of wide characters whose other half is overwritten."""
        if row[begin] == _SECOND_HALF[0]:
            row[begin - 1] = (" ", Style())
        if end < len(row) and row[end] == _SECOND_HALF[0]:
            row[end] = (" ", Style())

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append([])

    def _obey(self, code: re.Match[str]) -> None:
        """Colours, cursor up, erased lines; other codes (a hidden cursor) leave no trace."""
        argument, command = code.groups()
        if command == "m":
            self._decoder.decode_line(code[0])
        elif command == "A":
            self._row = max(0, self._row - int(argument or 1))
        elif command == "K":
            self._rows[self._row] = [] if argument == "2" else self._rows[self._row][: self._column]


def _line(row: Sequence[tuple[str, Style]]) -> Text:
    """A row as text, with one span for each run of characters of one style."""
    runs = groupby(row, key=lambda cell: cell[1])
    return Text.assemble(*(("".join(character for character, _ in cells), style) for style, cells in runs))


def run(command: Sequence[str], columns: int) -> tuple[int, str]:
    """Exit code of a command, and everything that it wrote to its terminal."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "COLUMNS")}
    environment["TERM"] = "xterm-256color"
    with subprocess.Popen(command, env=environment, stdin=its, stdout=its, stderr=its) as process:
        os.close(its)
        output = b"".join(iter(lambda: _read(ours), b""))
    os.close(ours)
    return process.returncode, output.decode()


def _read(terminal: int) -> bytes:
    """The next output; empty at the end, which Linux reports as an error."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def picture(command: Sequence[str], output: str, columns: int) -> str:
    """SVG of a terminal that ran a command."""
    terminal = Terminal(columns)
    terminal.feed(output)
    console = Console(record=True, width=columns, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "bold green"), (shlex.join(command), "bold")))
    for line in terminal.lines():
        console.print(line)
    svg = console.export_svg(title=command[0], unique_id="terminal")
    return _FONT.sub("", svg)  # the fonts would come from another host; the picture uses the reader's own


def main(arguments: Sequence[str] | None = None) -> int:
    """Record one command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, default=100, help="width of the terminal (default: 100)")
    parser.add_argument("file", type=Path, help="the SVG file to write")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    parsed = parser.parse_args(arguments)
    if not parsed.command:
        parser.error("name a command to run")
    code, output = run(parsed.command, parsed.columns)
    if code:
        sys.stderr.write(output)
        return code
    parsed.file.parent.mkdir(parents=True, exist_ok=True)
    parsed.file.write_text(picture(parsed.command, output, parsed.columns), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
