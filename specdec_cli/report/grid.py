"""A table that fits its terminal: columns wrap between words, or each row's cells stand below each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

_GAPS = (((0, 1), True), ((0, 1, 0, 0), True), ((0, 1, 0, 0), False))
"""Paddings of a cell, and whether there are edges: three columns of the terminal between two cells, or two."""
_NUMBER = re.compile(r"[-−+]?\d[\d,.]*( ?%|×)?")


class Grid(Table):
    """A table whose columns never break a word and are never cut off.

    Args:
        heads: of the columns; none at all has no head line.
        title: above the table.
        given: what rich's Table takes beside.
    """

    def __init__(self, *heads: str, title: str | None = None, **given: Any) -> None:
        given = {"show_header": any(heads), **given}
        super().__init__(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", **given)
        for head in heads:
            self.add_column(head, overflow="fold")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Columns beside each other where every word fits, else one row's cells below each other."""
        texts = [[_text(console, cell) for cell in _cells(column, self.show_header)] for column in self.columns]
        natural = [max((text.cell_len for text in column), default=0) for column in texts]
        least = [max((_longest_word(text) for text in column), default=0) for column in texts]
        for column, cells in zip(self.columns, texts, strict=True):
            if _are_numbers([text.plain for text in cells[self.show_header :]]):
                column.justify = "right"
        for self.padding, self.show_edge in _GAPS:
            room = options.max_width - self._borders(console, options, sum(natural))
            if sum(least) <= room:
                for column, width in zip(self.columns, _shrunk(natural, least, room), strict=True):
                    column.width, column.no_wrap = width, False
                yield from super().__rich_console__(console, options)
                return
        yield from self._stacked(console, options.max_width)

    def _borders(self, console: Console, options: ConsoleOptions, content: int) -> int:
        """Columns of the terminal between the table's columns and at its edges."""
        for column in self.columns:
            column.width = None
        whole = Measurement.get(console, options.update(width=100_000), self)
        return max(0, whole.maximum - content)

    def _stacked(self, console: Console, width: int) -> Iterator[Text]:
        """Each row as its first cell and a line for every other one."""
        if self.title is not None:
            yield Text(str(self.title), style="italic")
        heads = [_text(console, column.header) for column in self.columns]
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            first, *rest = [_text(console, cell) for cell in cells]
            if first.plain:
                yield from _wrapped(console, _named(heads[0], first), width)
            for head, text in zip(heads[1:], rest, strict=True):
                if text.plain:
                    yield from _wrapped(console, _named(head, text), width, indent=2)


def _named(head: Text, text: Text) -> Text:
    return Text.assemble((f"{head.plain}: ", "dim"), text) if head.plain else text


def _cells(column: Column, with_head: bool) -> list[Any]:
    return [*([column.header] if with_head else []), *column.cells]


def _text(console: Console, cell: Any) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell), highlight=False)


def _are_numbers(cells: Sequence[str]) -> bool:
    """Whether a column holds numbers, or dashes where there is none, whose places belong below each other."""
    given = [cell for cell in cells if cell not in ("", "–")]
    return bool(given) and all(_NUMBER.fullmatch(cell) for cell in given)


def _longest_word(text: Text) -> int:
    return max((Text(word).cell_len for word in text.plain.split()), default=0)


def _shrunk(natural: list[int], least: list[int], room: int) -> list[int]:
    """Widths that fit into the room: the widest column that can give way does, one at a time."""
    widths = list(natural)
    while sum(widths) > room:
        index = max((i for i, width in enumerate(widths) if width > least[i]), key=lambda i: widths[i])
        widths[index] -= 1
    return widths


def _wrapped(console: Console, text: Text, width: int, indent: int = 0) -> Iterator[Text]:
    lines = text.wrap(console, max(width - indent - 2, 1), overflow="fold")
    for i, line in enumerate(lines):
        line.rstrip()
        yield Text(" " * (indent + (2 if i else 0))) + line
