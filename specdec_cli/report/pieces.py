"""Pieces of model text: which of it was drafted and accepted, and which is the target's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

from specdec_cli.text.printable import printable

if TYPE_CHECKING:
    from specdec_cli.events import Emitted
    from specdec_cli.text.stream import Detokenizer

Kind = Literal["text", "accepted", "alternative", "own", "heading"]
STYLES: dict[Kind, str] = {
    "text": "",
    "accepted": "green",
    "alternative": "bold cyan",
    "own": "bold yellow",
    "heading": "bold",
}
_MARKS: dict[Kind, tuple[str, str]] = {"accepted": ("[", "]"), "alternative": ("{", "}")}
LEGEND: tuple[tuple[Kind, str], ...] = (("accepted", "drafted and accepted"), ("own", "the target's own"))
LEGEND_OF_TREES: tuple[tuple[Kind, str], ...] = (
    LEGEND[0],
    ("alternative", "accepted, not the draft's first choice"),
    LEGEND[1],
)


class Piece(NamedTuple):
    """Text of one kind, safe for a terminal."""

    text: str
    kind: Kind = "text"


def marked(piece: Piece) -> str:
    """The piece as plain text shows it: accepted tokens in brackets, alternatives of a tree in braces."""
    if piece.kind not in _MARKS or not piece.text:
        return piece.text
    left, right = _MARKS[piece.kind]
    return f"{left}{piece.text}{right}"


def plain_pieces(text: str) -> list[Piece]:
    """Released text as one piece, control characters gone."""
    safe = printable(text)
    return [Piece(safe)] if safe else []


class TokenPieces:
    """Cuts a sequence's released text where its tokens do.

    A detokenizer of its own says how long each token's text is; the text itself is what the engine released, so
    that held back and cropped text (stop strings, multi-token characters) comes out right.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._spans: deque[tuple[int, Kind]] = deque()

    def feed(self, emitted: Emitted) -> list[Piece]:
        """Pieces of the text that a step released."""
        for place, token in enumerate(emitted.tokens):
            kind: Kind = "own"
            if place < emitted.num_accepted:
                kind = "alternative" if emitted.ranks and emitted.ranks[place][0] > 1 else "accepted"
            self._spans.append((len(self._detokenizer.push(token)), kind))
        return self.cut(emitted.text)

    def cut(self, text: str) -> list[Piece]:
        """Pieces of released text, by the lengths that tokens announced; what none announced is the target's own."""
        pieces = []
        while text:
            length, kind = self._spans.popleft() if self._spans else (len(text), "own")
            if length > len(text):
                self._spans.appendleft((length - len(text), kind))
            pieces.append(Piece(printable(text[:length]), kind))
            text = text[length:]
        return [piece for piece in pieces if piece.text]


def joined(pieces: Iterable[Piece]) -> str:
    """The text of pieces, without marks."""
    return "".join(piece.text for piece in pieces)
