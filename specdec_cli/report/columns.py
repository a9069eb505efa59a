"""Tables of documents, each column declared once: its head, where its value stands, and how it is shown.

Terminals, pages and Markdown show the cells; CSV files take the values as they are.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_cli.measure.paths import value_at
from specdec_cli.report.table import NOTHING, number
from specdec_cli.text.printable import printable


def text(value: object) -> str:
    """A value as it is, or a dash."""
    return NOTHING if value is None else str(value)


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column.

    Args:
        head: its name.
        path: where its value stands in a row, keys with dots between.
        show: makes a cell of the value, which is None where the row lacks it.
        style: of a cell on a terminal, if not the usual one.
    """

    head: str
    path: str
    show: Callable[[Any], str] = text
    style: Callable[[str], str] | None = None

    def cell(self, row: Mapping[str, Any]) -> str:
        """The cell of a row."""
        return self.show(value_at(row, self.path))


def interval_columns(head: str, path: str, key: str = "median") -> tuple[TableColumn, TableColumn]:
    """A speed-up and its interval, `1.42×` and `1.31–1.55`; dashes for what is not known.

    Args:
        head: of the figure.
        path: of an object with the figure and `ci95`.
        key: of the figure.
    """

    def ends(interval: Sequence[float] | None) -> str:
        return NOTHING if interval is None else f"{interval[0]:.2f}–{interval[1]:.2f}"

    return TableColumn(head, f"{path}.{key}".lstrip("."), times), TableColumn("95 %", f"{path}.ci95".lstrip("."), ends)


def one_digit(value: float | None) -> str:
    """A number with one digit behind the point, or a dash."""
    return number(value, 1)


def named_rows(parts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parts of a document as rows, each with its key as `name`."""
    return [{"name": name, **part} for name, part in parts.items()]


def times(speedup: float | None) -> str:
    """A speed-up, `1.42×`, or a dash."""
    return NOTHING if speedup is None else f"{speedup:.2f}×"


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of text.

    Args:
        title: of the table.
        heads: of its columns.
        rows: its cells.
        legend: a sentence about it, below it on a terminal.
        num_first: columns that a terminal shows without `--details`; None for all of them.
        styles: of cells on a terminal, by the column's place.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: str | None = None
    num_first: int | None = None
    styles: Mapping[int, Callable[[str], str]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        title: str,
        columns: Sequence[TableColumn],
        rows: Iterable[Mapping[str, Any]],
        legend: str | None = None,
        num_first: int | None = None,
    ) -> PageTable:
        """The table of some rows of a document."""
        cells = [[column.cell(row) for column in columns] for row in rows]
        styles = {place: column.style for place, column in enumerate(columns) if column.style is not None}
        return cls(title, [column.head for column in columns], cells, legend, num_first, styles)

    def markdown(self) -> list[str]:
        """Lines of Markdown, an empty one at the end."""
        lines = [self.heads, ["---"] * len(self.heads), *self.rows]
        return [*(f"| {' | '.join(map(markdown_text, line))} |" for line in lines), ""]

    @property
    def first(self) -> PageTable:
        """The columns that a terminal shows first, without the title."""
        num = self.num_first
        return PageTable("", self.heads[:num], [row[:num] for row in self.rows])

    @property
    def rest(self) -> PageTable:
        """The first column and those that `first` leaves out."""
        num = self.num_first
        return PageTable("", [self.heads[0], *self.heads[num:]], [[row[0], *row[num:]] for row in self.rows])


def markdown_text(value: object) -> str:
    """Text on one line that stays in its cell and is no markup."""
    safe = printable(str(value)).replace("\n", " ")
    return safe.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")


def csv_text(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A CSV file.

    Args:
        columns: heads, each with the path of its value in a row.
        rows: parts of a document.
    """
    file = io.StringIO()
    lines = ([value_at(row, path) for path in columns.values()] for row in rows)
    csv.writer(file, lineterminator="\n").writerows([list(columns), *lines])
    return file.getvalue()


def interval_paths(name: str, path: str, key: str = "median", ends: str = "") -> dict[str, str]:
    """Three columns of a CSV file: a figure, and the lower and upper end of its interval.

    Args:
        name: head of the figure.
        path: of an object with the figure and `ci95`.
        key: of the figure.
        ends: what the heads of the ends begin with; the figure's head without one.
    """
    low = ends or name
    return {name: f"{path}.{key}", f"{low}_low": f"{path}.ci95.0", f"{low}_high": f"{path}.ci95.1"}


def origin(document: Mapping[str, Any], first: Sequence[str] = ("platform",)) -> list[tuple[str, str]]:
    """The machine and the version that made a document, each with its name.

    Args:
        document: any.
        first: keys of the environment before those of every document.
    """
    environment = document["environment"]
    keys = (*first, "device", "dtype", "threads", "torch", "transformers", "python")
    machine = ", ".join(f"{key} {environment[key]}" for key in keys if environment.get(key) is not None)
    return [("machine", machine), ("made", f"{document['created']} by specdec {document['specdec_version']}")]
