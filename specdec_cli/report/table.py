"""The table of a run: a column per arm, the acceptance statistics and where the time went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from specdec_cli.engine.meter import Meter
from specdec_cli.events import SpeculativeCounts
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


def percent(share: float | None) -> str:
    """A share as a percentage, or a dash."""
    return NOTHING if share is None else f"{100 * share:.1f}%"


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash."""
    return NOTHING if value is None else f"{value:.{digits}f}"


_MOST_RANKS = 8


def rank_words(rates: Sequence[float | None]) -> str:
    """Acceptance by rank, `87% 15% 0%`; what follows the first ranks is left out."""
    shown = [NOTHING if rate is None else f"{100 * rate:.0f}%" for rate in rates[:_MOST_RANKS]]
    return " ".join([*shown, *(["…"] if len(rates) > _MOST_RANKS else [])]) or NOTHING


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


def _of_trees(cell: Callable[[SpeculativeCounts], str]) -> Callable[[Column], str]:
    """A cell that only an arm with trees fills."""
    return lambda column: cell(column.meter.counts) if column.meter.counts.drafted_trees else NOTHING


_ROWS: tuple[tuple[str, Callable[[Column], str]], ...] = (
    ("k", lambda column: str(column.k)),
    ("drafted", lambda column: str(column.meter.counts.num_draft_tokens)),
    ("drafted nodes", _of_trees(lambda counts: str(counts.num_draft_nodes))),
    ("accepted", lambda column: str(column.meter.counts.num_accepted_tokens)),
    ("acceptance rate", lambda column: percent(column.meter.counts.acceptance_rate)),
    ("acceptance length", lambda column: number(column.meter.counts.acceptance_length)),
    ("accepted at position 1…k", _per_position),
    ("accepted by rank 1, 2, …", _of_trees(lambda counts: rank_words(counts.acceptance_by_rank))),
    ("tokens", lambda column: str(column.meter.num_tokens)),
    ("tokens/s", _rate),
    ("time: draft / verify / overhead", _time),
)


_ROWS_WITHOUT_DRAFT = frozenset({"tokens", "tokens/s"})
"""All that there is where no arm has a draft."""
_ROWS_OF_TREES = frozenset({"drafted nodes", "accepted by rank 1, 2, …"})
"""Left out where every arm drafts chains."""


def run_table(columns: Sequence[Column], title: str | None = None) -> Table:
    """The table; one arm has no head above its column."""
    table = Grid("", *(column.name for column in columns), title=title, show_header=len(columns) > 1)
    table.columns[0].style = "dim"
    has_draft = any(column.k for column in columns)
    has_trees = any(column.meter.counts.drafted_trees for column in columns)
    for name, cell in _ROWS:
        if (name in _ROWS_OF_TREES and not has_trees) or (name not in _ROWS_WITHOUT_DRAFT and not has_draft):
            continue
        table.add_row(name, *(cell(column) for column in columns))
    return table
