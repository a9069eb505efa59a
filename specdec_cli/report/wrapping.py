"""Lines that break between words and leave whole what a user copies."""

from __future__ import annotations

import re

from rich.text import Text

_WORD = re.compile(r"(?:[^\s`]*`[^`\n]+`)+[^\s`]*|\S*\d %\S*|\S+")
"""A command between backticks is one word, and so is a number with its percent sign."""


def words(text: Text) -> list[Text]:
    """The parts of a text that no line break may divide."""
    return [text[word.start() : word.end()] for word in _WORD.finditer(text.plain)]


def wrapped(text: Text, width: int) -> list[Text]:
    """The lines of a text.

    Args:
        text: with or without line breaks of its own.
        width: columns of the terminal. A longer word gets a line of its own and stays whole: a terminal that wraps it
            still copies it in one piece.
    """
    return [line for paragraph in text.split("\n") for line in _lines(paragraph, width)]


def _lines(text: Text, width: int) -> list[Text]:
    lines, begin, end = [], 0, 0
    for word in _WORD.finditer(text.plain):
        if end and text[begin : word.end()].cell_len > width:
            lines.append(text[begin:end])
            begin = word.start()
        end = word.end()
    return [*lines, text[begin:end]]
