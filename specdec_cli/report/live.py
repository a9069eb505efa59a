"""The live area at the foot of a terminal: the text's last lines and the table, redrawn in place a few times a second.

Nothing here runs in a thread. The command calls `refresh` between steps; most calls return at once.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from rich.console import Console, Group, RenderableType
from rich.live_render import LiveRender
from rich.text import Text

from specdec_cli.report.pieces import STYLES, Piece
from specdec_cli.report.texts import Writer

_INTERVAL_SECONDS = 0.16
_MOST_OF_THE_TIME = 20  # a draw that took t is followed by at least 20 t without one: 5 % of a run at most


class LiveArea:
    """Draws at the foot of the terminal, and takes text that ends up above it.

    Complete lines go to standard output for good; the line that still grows is part of the area. So text and table
    share a terminal without fighting, and what remains at the end is the text, unbroken, as a pipe would have it.

    Args:
        console: of standard error, a terminal.
        content: what stands under the text, pulled when it is drawn.
        writer: writes to standard output; None when text is not streamed there.
        is_shared: whether standard output is this terminal too.
    """

    def __init__(
        self, console: Console, content: Callable[[], RenderableType], writer: Writer | None, is_shared: bool
    ) -> None:
        self._console = console
        self._content = content
        self._writer = writer
        self._is_shared = is_shared
        self._render = LiveRender("", vertical_overflow="crop")
        self._is_drawn = False
        self._growing: list[Piece] = []
        self._next = 0.0

    def __enter__(self) -> LiveArea:
        """Hide the cursor and draw."""
        self._console.show_cursor(False)
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        """Erase the area, write what was still growing, give the cursor back."""
        self._erase()
        self._console.show_cursor(True)
        growing, self._growing = self._growing, []
        self._write(growing)

    def put(self, piece: Piece) -> None:
        """Take text: complete lines are written above the area."""
        if not self._is_shared:
            self._write([piece])
            return
        head, newline, tail = piece.text.rpartition("\n")
        if newline:
            complete = [*self._growing, Piece(head + newline, piece.kind)]
            self._growing = []
            was_drawn = self._is_drawn
            self._erase()
            self._write(complete)
            if was_drawn:
                self._draw()
        if tail:
            self._growing.append(Piece(tail, piece.kind))

    def refresh(self) -> None:
        """Draw again if the last time is long enough ago."""
        if perf_counter() >= self._next:
            self._draw()

    def _write(self, pieces: list[Piece]) -> None:
        if self._writer is not None and pieces:
            for piece in pieces:
                self._writer.put(piece)
            self._writer.flush()

    def _erase(self) -> None:
        if self._is_drawn:
            self._console.control(self._render.position_cursor())
            self._is_drawn = False

    def _draw(self) -> None:
        begin = perf_counter()
        self._erase()
        content = self._content()
        self._render.set_renderable(Group(*self._text_lines(content), content))
        self._console.print(self._render, end="")
        self._is_drawn = True
        spent = perf_counter() - begin
        self._next = begin + max(_INTERVAL_SECONDS, _MOST_OF_THE_TIME * spent)

    def _text_lines(self, content: RenderableType) -> list[Text]:
        """The growing line, wrapped, its last lines only where the terminal is too low for all."""
        if not self._growing:
            return []
        width, height = self._console.size
        below = len(self._console.render_lines(content))
        room = max(1, height - below - 1)
        text = Text()
        for piece in self._growing:
            text.append(piece.text, STYLES[piece.kind] or None)
        most = width * (room + 1)
        if len(text) > most:
            # Cut at a multiple of the width, so that lines do not move at every draw.
            text = text[len(text) // width * width - most + width :]
        return list(text.wrap(self._console, width))[-room:]
