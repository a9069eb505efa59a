"""The report of `import`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec_cli.report.grid import Grid
from specdec_cli.report.result import print_notes_and_gates
from specdec_cli.report.table import NOTHING, number, percent


def print_imported(console: Console, document: Mapping[str, Any]) -> None:
    """Print counts, rates by position, the tool's own figures, notices and gates."""
    source, counts = document["source"], document["speculative"]
    console.print(Text(f"{source['tool']}: {source['form']}"), soft_wrap=True)
    if counts is not None:
        grid = Grid("drafting steps", "drafted", "accepted", "rate", "length")
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        cells = [NOTHING if counts[name] is None else str(counts[name]) for name in names]
        grid.add_row(*cells, percent(counts["acceptance_rate"]), number(counts["acceptance_length"]))
        console.print(grid)
        rates = counts["per_position_acceptance_rates"]
        if rates:
            console.print(Text(f"accepted at position 1, 2, ...: {' '.join(map(percent, rates))}"), soft_wrap=True)
    if document["reported"]:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in document["reported"].items())
        console.print(Text(f"as {source['tool']} reports: {shown}"), soft_wrap=True)
        for name in document["reported"]:
            if name in document["definitions"]:
                console.print(Text(f"  {name}: {document['definitions'][name]}"), soft_wrap=True)
    print_notes_and_gates(console, document)
