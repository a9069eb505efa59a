"""Texts on standard output: several in their order, the first unfinished one streaming."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.color import ColorSystem
from rich.style import Style

from specdec_cli.report.page import to_nowhere
from specdec_cli.report.pieces import STYLES, Piece, marked


class Sink(Protocol):
    """Where pieces go."""

    def put(self, piece: Piece) -> None:
        """Take the next piece."""
        ...


class Writer:
    """Writes pieces to a stream, coloured or with marks.

    Args:
        stream: standard output.
        colour: whether colours mark the kinds; otherwise accepted tokens are in brackets.
        goes_on: whether there is more to be done than to write, so that a reader who goes away ends nothing.
    """

    def __init__(self, stream: TextIO, colour: bool, goes_on: bool = False) -> None:
        self.stream = stream
        self.colour = colour
        self._goes_on = goes_on

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

    def _put(self, piece: Piece) -> None:
        if not self.colour:
            self.stream.write(marked(piece))
        elif STYLES[piece.kind]:
            style = Style.parse(STYLES[piece.kind])
            self.stream.write(style.render(piece.text, color_system=ColorSystem.STANDARD))
        else:
            self.stream.write(piece.text)


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
