"""A measurement's result on a terminal: the verdict, the figures, what limits them; the rest with `--details`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec_cli.quantities import counted
from specdec_cli.report.columns import PageTable
from specdec_cli.report.grid import Grid
from specdec_cli.report.recommendation import IN_USE, RECOMMENDED

_QUIET = 0.25  # of the cores: a load that does not change figures


def print_result(
    console: Console,
    body: Mapping[str, Any],
    verdict: Sequence[str],
    figures: Iterable[PageTable | str],
    checks: Iterable[str | None],
    details: Iterable[PageTable | str] | None,
    left_out: str,
) -> None:
    """Print a result.

    Args:
        console: where it is printed.
        body: the document, of which the load, the notices and the gates are printed.
        verdict: sentences.
        figures: one table, or one for each batch size.
        checks: sentences on what the figures rest on, such as the comparison of tokens.
        details: tables and sentences; None where `--details` was not asked for.
        left_out: what `--details` would add, in words.
    """
    for sentence in verdict:
        console.print(Text(sentence, style="bold"), soft_wrap=True)
    if load := load_words(body["machine"]):
        console.print(Text(load, style="yellow"), soft_wrap=True)
    _print_all(console, figures, style="")
    for line in filter(None, checks):
        console.print(Text(line), soft_wrap=True)
    print_notes_and_gates(console, body)
    if details is None:
        console.print(Text(f"--details adds {left_out}", style="dim"), soft_wrap=True)
        return
    console.print()
    _print_all(console, details, style="dim")


def _print_all(console: Console, tables: Iterable[PageTable | str], style: str) -> None:
    for table in tables:
        if isinstance(table, str):
            console.print(Text(table, style=style), soft_wrap=True)
            continue
        console.print(grid_of(table))
        if table.legend is not None:
            console.print(Text(table.legend, style=style), soft_wrap=True)


def load_words(machine: Mapping[str, Any]) -> str | None:
    """Warning that the figures below come from a busy machine; None on a quiet one."""
    load = f"load {machine['load_before']:.1f} on {counted(machine['num_cores'], 'core')} before the run"
    if machine["busy"]:
        return f"Busy machine ({load}): a quiet one is faster than these figures."
    if machine["load_before"] > _QUIET * machine["num_cores"]:
        return f"{load.capitalize()}: if another program caused it, a quiet machine is faster than these figures."
    return None


def print_notes_and_gates(console: Console, body: Mapping[str, Any]) -> None:
    """Print what a reader must know beside the figures, and what became of the gates."""
    for notice in body["notices"]:
        console.print(Text(f"note: {notice}", style="yellow"), soft_wrap=True)
    for gate in body.get("gates", ()):
        style = "green" if gate["passed"] else "bold red"
        word = "passed" if gate["passed"] else "FAILED"
        console.print(Text(f"gate {word}: fail if {gate['expression']}: {gate['reason']}", style=style), soft_wrap=True)


def grid_of(table: PageTable) -> Grid:
    """A table on a terminal, whose cells are text as they stand; a row that is recommended is bold."""
    grid = Grid(*table.heads, title=table.title or None)
    for row in table.rows:
        styles = [table.styles[i](cell) if i in table.styles else "" for i, cell in enumerate(row)]
        grid.add_row(*map(Text, row, styles), style="bold" if {RECOMMENDED, IN_USE} & set(row) else "")
    return grid
