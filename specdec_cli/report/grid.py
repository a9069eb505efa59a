"""A table that fits its terminal: columns wrap between words, then stand in two tables, then each row is a list."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from specdec_cli.report.wrapping import words, wrapped

_Gap = tuple[tuple[int, int] | tuple[int, int, int, int], bool]

_GAPS: tuple[_Gap, ...] = (((0, 1), True), ((0, 1, 0, 0), True), ((0, 1, 0, 0), False))
"""Paddings of a cell, and whether there are edges: three columns of the terminal between two cells, or two."""
_NUMBER = re.compile(r"[-−+]?\d[\d,.]*( ?%|×)?")


class Grid(Table):
    """A table whose columns never break a word and are never cut off.

    Args:
        heads: of the columns; none at all has no head line.
        title: above the table.
        may_split: whether the columns may stand in two tables, one below the other. Both begin with the columns that
            tell the rows apart.
        given: what rich's Table takes beside.
    """

    def __init__(self, *heads: str, title: str | None = None, may_split: bool = True, **given: Any) -> None:
        given = {"show_header": any(heads), **given}
        super().__init__(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", **given)
        self._may_split = may_split and bool(heads) and bool(heads[0])
        for head in heads:
            self.add_column(head, overflow="fold")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The columns beside each other, else in two tables, else one row's cells below each other."""
        texts = [[_text(console, cell) for cell in _cells(column, self.show_header)] for column in self.columns]
        tables = self._fitted(console, options, texts) or self._split(console, options, texts)
        if not tables:
            yield from self._stacked(console, options.max_width)
            return
        tables[0].title = self.title
        yield from tables if tables[0].show_edge else _apart(tables)

    def _fitted(self, console: Console, options: ConsoleOptions, texts: list[list[Text]]) -> list[Table]:
        """The one table, with the widest gaps that have room for every word; none if there are none."""
        for gap in _GAPS:
            table = self._part(console, options, texts, range(len(texts)), gap)
            if table is not None:
                return [table]
        return []

    def _split(self, console: Console, options: ConsoleOptions, texts: list[list[Text]]) -> list[Table]:
        """Two tables of the same look, without wrapped cells if possible, the first as wide as it can be; or none."""
        places, num_keys = range(len(texts)), self._num_keys(texts)
        for may_wrap, gap in product((False, True), _GAPS):
            for cut in reversed(places[num_keys + 1 :]) if self._may_split else ():
                first = self._part(console, options, texts, places[:cut], gap, may_wrap)
                second = self._part(console, options, texts, [*places[:num_keys], *places[cut:]], gap, may_wrap)
                if first is not None and second is not None:
                    return [first, second]
        return []

    def _num_keys(self, texts: list[list[Text]]) -> int:
        """How many of the first columns it takes to tell every row from the others."""
        rows = list(zip(*([text.plain for text in column[self.show_header :]] for column in texts), strict=True))
        return next((num for num in range(1, len(texts)) if len({row[:num] for row in rows}) == len(rows)), len(texts))

    def _part(
        self,
        console: Console,
        options: ConsoleOptions,
        texts: list[list[Text]],
        places: Sequence[int],
        gap: _Gap,
        may_wrap: bool = True,
    ) -> Table | None:
        """A table of some columns; None if it does not fit."""
        natural = [max((text.cell_len for text in texts[place]), default=0) for place in places]
        least = [max((_longest_word(text) for text in texts[place]), default=0) for place in places]
        chosen = [texts[place] for place in places]
        borders = _borders(console, options, self._drawn(chosen, places, gap), sum(natural))
        room = options.max_width - borders
        if sum(least if may_wrap else natural) > room:
            return None
        widths = _shrunk(natural, least, room)
        folded = [
            [Text("\n").join(wrapped(text, width)) for text in column]
            for column, width in zip(chosen, widths, strict=True)
        ]
        return self._drawn(folded, places, gap)

    def _drawn(self, texts: list[list[Text]], places: Sequence[int], gap: _Gap) -> Table:
        """A table of some columns with their heads and cells."""
        padding, show_edge = gap
        num_heads = int(self.show_header)
        table = Table(
            box=self.box,
            pad_edge=False,
            padding=padding,
            show_edge=show_edge,
            show_header=self.show_header,
            title_justify=self.title_justify,
        )
        for place, cells in zip(places, texts, strict=True):
            column = self.columns[place]
            is_number = _are_numbers([text.plain for text in cells[num_heads:]])
            justify = "right" if is_number else column.justify
            table.add_column(cells[0] if num_heads else "", style=column.style, justify=justify, no_wrap=True)
        for row, line in zip(self.rows, zip(*(column[num_heads:] for column in texts), strict=True), strict=True):
            table.add_row(*line, style=row.style, end_section=row.end_section)
        return table

    def _stacked(self, console: Console, width: int) -> Iterator[Text]:
        """Each row as its first cell and a line for every other one."""
        if self.title is not None:
            yield Text(str(self.title), style="italic")
        heads = [_text(console, column.header) for column in self.columns]
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            first, *rest = [_text(console, cell) for cell in cells]
            if first.plain:
                yield from _indented(console, _named(heads[0], first), width)
            for head, text in zip(heads[1:], rest, strict=True):
                if text.plain:
                    yield from _indented(console, _named(head, text), width, indent=2)


def _apart(tables: Sequence[Table]) -> Iterator[Table | Text]:
    """Tables without edges, with an empty line between them."""
    for i, table in enumerate(tables):
        yield from (Text(""), table) if i else (table,)


def _borders(console: Console, options: ConsoleOptions, table: Table, content: int) -> int:
    """Columns of the terminal between a table's columns and at its edges."""
    whole = Measurement.get(console, options.update(width=100_000), table)
    return max(0, whole.maximum - content)


def _named(head: Text, text: Text) -> Text:
    return Text.assemble((f"{head.plain}: ", "dim"), text) if head.plain else text


def _cells(column: Column, with_head: bool) -> list[Any]:
    return [*([column.header] if with_head else []), *column.cells]


def _text(console: Console, cell: Any) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell), highlight=False)


def _are_numbers(cells: Sequence[str]) -> bool:
    """Whether a column holds numbers, or dashes where there is none, whose places belong below each other."""
    shown = [cell for cell in cells if cell not in ("", "–")]
    return bool(shown) and all(_NUMBER.fullmatch(cell) for cell in shown)


def _longest_word(text: Text) -> int:
    return max((word.cell_len for word in words(text)), default=0)


def _shrunk(natural: list[int], least: list[int], room: int) -> list[int]:
    """Widths that fit into the room: the widest column that can give way does, one at a time."""
    widths = list(natural)
    while sum(widths) > room:
        index = max((i for i, width in enumerate(widths) if width > least[i]), key=lambda i: widths[i])
        widths[index] -= 1
    return widths


def _indented(console: Console, text: Text, width: int, indent: int = 0) -> Iterator[Text]:
    """The lines of one cell in a list; a word that is too long for the terminal is folded."""
    room = max(width - indent - 2, 1)
    lines = [line for whole in wrapped(text, room) for line in whole.wrap(console, room, overflow="fold")]
    for i, line in enumerate(lines):
        line.rstrip()
        yield Text(" " * (indent + (2 if i else 0))) + line
