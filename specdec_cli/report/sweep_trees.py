"""Trees in a sweep's document and its tables: a row per tree, predicted and measured as every k is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specdec_cli.report.recommendation import depth_mark
from specdec_cli.report.table import NOTHING, interval_cells, number

TREE_HEADS = (
    *("tree", "nodes", "tokens a step", "predicted", "95 %", "measured", "95 %", ""),
    *("depth", "tokens/s", "draft/verify/rest %"),
)


def tree_rows(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """The trees of one batch size as cells, from the document; tokens/s are predicted where nothing was measured."""
    for row in found.get("trees", ()):
        predicted, measured = row["predicted"], row["measured"]
        shares = (predicted["shares"] or {}).values()
        yield [
            row["tree"],
            str(row["nodes"]),
            number(row["acceptance_length"]),
            *interval_cells(predicted, "speedup"),
            *interval_cells(measured, "speedup"),
            depth_mark(row["depth"], found["recommended"], row["tree"]),
            str(row["depth"]),
            number((measured or predicted)["tokens_per_second"], 1),
            "/".join(f"{100 * share:.0f}" for share in shares) or NOTHING,
        ]
