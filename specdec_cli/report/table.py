"""The table of a run: a column per arm, the acceptance statistics and where the time went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from specdec_cli.engine.meter import Meter
from specdec_cli.report.grid import Grid

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Column:
    """One arm in the table.

    Args:
        name: the column's head.
        k: most tokens drafted in a step; 0 has no draft.
        meter: its counts.
        tokens_per_second: a measured rate to show in place of the meter's own.
    """

    name: str
    k: int
    meter: Meter
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class PageTable:
    """One table of a page or a file."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def percent(share: float | None) -> str:
    """A share as a percentage, or a dash."""
    return NOTHING if share is None else f"{100 * share:.1f}%"


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def _per_position(column: Column) -> str:
    rates = column.meter.counts.per_position_acceptance_rates
    return " ".join(NOTHING if rate is None else f"{100 * rate:.0f}%" for rate in rates) or NOTHING


def _rate(column: Column) -> str:
    rate = column.tokens_per_second
    return number(column.meter.tokens_per_second if rate is None else rate, 1)


def _time(column: Column) -> str:
    shares = column.meter.shares
    if shares is None:
        return NOTHING
    return f"{100 * shares.draft:.0f}% / {100 * shares.verify:.0f}% / {100 * shares.overhead:.0f}%"


_ROWS: tuple[tuple[str, Callable[[Column], str]], ...] = (
    ("k", lambda column: str(column.k)),
    ("drafted", lambda column: str(column.meter.counts.num_draft_tokens)),
    ("accepted", lambda column: str(column.meter.counts.num_accepted_tokens)),
    ("acceptance rate", lambda column: percent(column.meter.counts.acceptance_rate)),
    ("acceptance length", lambda column: number(column.meter.counts.acceptance_length)),
    ("accepted at position 1…k", _per_position),
    ("tokens", lambda column: str(column.meter.num_tokens)),
    ("tokens/s", _rate),
    ("time: draft / verify / overhead", _time),
)


def run_table(columns: Sequence[Column], title: str | None = None) -> Table:
    """The table; one arm has no head above its column."""
    table = Grid("", *(column.name for column in columns), title=title, show_header=len(columns) > 1)
    table.columns[0].style = "dim"
    for name, cell in _ROWS:
        table.add_row(name, *(cell(column) for column in columns))
    return table
