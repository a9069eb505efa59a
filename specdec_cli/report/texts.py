"""Texts on standard output: several in their order, the first unfinished one streaming."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.style import Style

from specdec_cli.report.page import terminal_width, to_nowhere
from specdec_cli.report.pieces import STYLES, Piece, marked


class Sink(Protocol):
    """Receiver of pieces."""

    def put(self, piece: Piece) -> None:
        """Take the next piece."""
        ...


class Writer:
    """Writes pieces to a stream, coloured or with marks. On a terminal, lines break between words.

    Args:
        stream: standard output.
        colour: whether colours mark the kinds; otherwise accepted tokens are in brackets.
        goes_on: whether there is more to be done than to write, so that a reader who goes away ends nothing.
    """

    def __init__(self, stream: TextIO, colour: bool, goes_on: bool = False) -> None:
        self.stream = stream
        self.colour = colour
        self._goes_on = goes_on
        self._wraps = stream.isatty()
        self._column, self._gap = 0, ""
        self._word: list[tuple[str, str]] = []

    def put(self, piece: Piece) -> None:
        """Write one piece; `flush` shows it."""
        with self._reader_may_go():
            self._put(piece)

    def flush(self) -> None:
        """Show what was written."""
        with self._reader_may_go():
            self.stream.flush()

    @contextmanager
    def _reader_may_go(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            if not self._goes_on:
                raise
            to_nowhere(self.stream)

    def end(self) -> None:
        """Write what waits for the end of its word."""
        with self._reader_may_go():
            self._release()
            self.stream.flush()

    def _put(self, piece: Piece) -> None:
        text, style = (piece.text, STYLES[piece.kind]) if self.colour else (marked(piece), "")
        if not self._wraps:
            self._write(text, style)
            return
        for part in _PARTS.findall(text):
            if part == "\n":
                self._release()
                self._write(part)
                self._column, self._gap = 0, ""
            elif part.isspace():
                self._release()
                self._gap += part
            else:
                self._word.append((part, style))
                if cell_len(part) > len(part):
                    self._release()

    def _release(self) -> None:
        """Write the word that is whole now, on a new line if it would cross the terminal's edge."""
        if not self._word:
            return
        width, num = terminal_width(self.stream), sum(cell_len(part) for part, _ in self._word)
        column = len((" " * self._column + self._gap).expandtabs())
        if self._column and column + num > width >= num:
            self._write("\n")
            column = 0
        else:
            self._write(self._gap)
        for part, style in self._word:
            self._write(part, style)
        self._gap, self._word = "", []
        self._column = column + num if column + num <= width else (column + num) % width

    def _write(self, text: str, style: str = "") -> None:
        self.stream.write(Style.parse(style).render(text, color_system=ColorSystem.STANDARD) if style else text)


_WIDE = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6"
_PARTS = re.compile(rf"\n|[^\S\n]+|[{_WIDE}]|[^\s{_WIDE}]+")
"""Line breaks, gaps, characters that a line may break beside, words."""


class Texts:
    """Keeps texts in order: pieces of the first unfinished one pass through, the others' wait.

    Args:
        places: the texts' places, in order; with several, each begins with a line `### N` (N = place + 1).
        sink: takes the pieces.
    """

    def __init__(self, places: Sequence[int], sink: Sink) -> None:
        self._sink = sink
        self._places = list(places)
        self._has_headings = len(self._places) > 1
        self._waiting: dict[int, list[Piece]] = {place: [] for place in self._places}
        self._ended: set[int] = set()
        self._current = 0
        self._is_open = False
        self._ends_line = True

    def feed(self, place: int, pieces: Iterable[Piece]) -> None:
        """Take pieces of a text."""
        if self._current < len(self._places) and place == self._places[self._current]:
            self._open()
            for piece in pieces:
                self._put(piece)
        else:
            self._waiting[place] += pieces

    def end(self, place: int) -> None:
        """A text is complete: the next one streams, or what of it has waited."""
        self._ended.add(place)
        while self._current < len(self._places) and self._places[self._current] in self._ended:
            self._open()
            if not self._ends_line:
                self._put(Piece("\n"))
            self._current += 1
            self._is_open = False
        if self._current < len(self._places) and self._waiting[self._places[self._current]]:
            self._open()

    def _open(self) -> None:
        """Begin the current text, if it has not, with its heading and what has waited."""
        if self._is_open:
            return
        self._is_open = True
        place = self._places[self._current]
        self._ends_line = False
        if self._has_headings:
            gap = "\n" if self._current else ""
            self._put(Piece(f"{gap}### {place + 1}", "heading"))
            self._put(Piece("\n"))
            self._ends_line = False
        waiting, self._waiting[place] = self._waiting[place], []
        for piece in waiting:
            self._put(piece)

    def _put(self, piece: Piece) -> None:
        if piece.text:
            self._sink.put(piece)
            self._ends_line = piece.text.endswith("\n")
