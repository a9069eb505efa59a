"""Trees in a sweep's document and its tables: a row per tree, predicted and measured as every k is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from specdec_cli.report.grid import Grid
from specdec_cli.report.recommendation import depth_mark
from specdec_cli.report.table import NOTHING, number

TREE_HEADS = (
    *("tree", "nodes", "depth", "tokens a step", "predicted (95 %)", "measured (95 %)", "tokens/s"),
    *("draft/verify/rest %", ""),
)


def tree_rows(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """The trees of one batch size as cells, from the document; tokens/s are predicted where nothing was measured."""
    for row in found.get("trees", ()):
        predicted, measured = row["predicted"], row["measured"]
        shares = (predicted["shares"] or {}).values()
        yield [
            row["tree"],
            str(row["nodes"]),
            str(row["depth"]),
            number(row["acceptance_length"]),
            _speedup(predicted),
            _speedup(measured),
            number((measured or predicted)["tokens_per_second"], 1),
            "/".join(f"{100 * share:.0f}" for share in shares) or NOTHING,
            depth_mark(row["depth"], found["recommended"], row["tree"]),
        ]


def tree_table(found: Mapping[str, Any]) -> RenderableType:
    """The trees of one batch size; the recommended one is marked, or the one in use."""
    table = Grid(*TREE_HEADS)
    for cells in tree_rows(found):
        table.add_row(*(Text(cell) for cell in cells), style="bold" if cells[-1] else "")
    return table


def _speedup(found: Mapping[str, Any] | None) -> str:
    """`1.42× (1.31–1.55)`, or a dash."""
    if found is None or found["speedup"] is None:
        return NOTHING
    ends = "" if found["ci95"] is None else " ({:.2f}–{:.2f})".format(*found["ci95"])
    return f"{found['speedup']:.2f}×{ends}"
