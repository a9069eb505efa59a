"""A text in pieces that are encoded one by one, so that a text that grows is never encoded again as a whole.

A piece begins at a space behind something that is none, where all common tokenizers cut a text as well; one without
spaces is cut after `MOST_BYTES`. Where a piece begins depends on what stands before that place alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec_cli.text.tokenizer import Tokenizer

MOST_BYTES = 96
_SPACE = re.compile(rb"(?<=\S) ")
_CONTINUATION = range(0x80, 0xC0)
_ANCHORS = ("a", ".", "\n", "\u3002")
_MOST_KEPT = 1 << 15


def piece_starts(text: bytes | bytearray, begin: int, first: int) -> Iterator[int]:
    """Where pieces begin, from place `first` on.

    Args:
        text: UTF-8; its end may lie in a character.
        begin: where the last piece before begins.
        first: places before it were asked for already.
    """
    spaces = [match.start() for match in _SPACE.finditer(text, first) if match.start() > begin]
    for end in (*spaces, len(text)):
        while end - begin > MOST_BYTES:
            place = begin + MOST_BYTES
            while place < end and text[place] in _CONTINUATION:
                place += 1
            if place >= end:
                break
            if place >= first:
                yield place
            begin = place
        if end < len(text):
            yield end
            begin = end


def num_incomplete(text: bytes | bytearray) -> int:
    """Bytes at the end of a text that begin a character and do not complete it: 0 to 3."""
    for num in range(1, min(3, len(text)) + 1):
        byte = text[-num]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return num if num < needed else 0
        if byte < 0x80:
            return 0
    return 0


class PieceEncoder:
    """Encodes pieces, each as it stands behind other text, and keeps what it found."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._found: dict[tuple[bytes, bool], tuple[int, ...]] = {}
        self._anchors = [(anchor, self._encode(anchor)) for anchor in _ANCHORS]

    def encode(self, piece: bytes, begins: bool) -> tuple[int, ...]:
        """Token ids of a piece; bytes that are no UTF-8 are left out.

        Args:
            piece: UTF-8.
            begins: whether it begins a text.
        """
        key = piece, begins
        tokens = self._found.get(key)
        if tokens is None:
            if len(self._found) >= _MOST_KEPT:
                self._found.clear()
            text = piece.decode("utf-8", "ignore")
            tokens = self._found[key] = self._encode(text) if begins else self._encode_inside(text)
        return tokens

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _encode_inside(self, text: str) -> tuple[int, ...]:
        """As it is encoded behind a short text that keeps its own tokens."""
        for anchor, tokens in self._anchors:
            both = self._encode(anchor + text)
            if tokens and both[: len(tokens)] == tokens:
                return both[len(tokens) :]
        return self._encode(text)
