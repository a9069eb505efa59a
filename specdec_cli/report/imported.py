"""The document of `import`, `specdec.import/1`, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from specdec_cli.report.grid import Grid
from specdec_cli.report.schema import read_schema
from specdec_cli.report.table import NOTHING, number, percent

if TYPE_CHECKING:
    from specdec_cli.measure.imported.record import ImportedRun

SCHEMA = "specdec.import/1"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the whole document."""
    return read_schema("import")


def imported_body(run: ImportedRun, files: Sequence[Path]) -> dict[str, Any]:
    """The document's own fields, after those that every document has. `gates` is empty until the gates are judged."""
    return {
        "source": {"tool": run.tool, "form": run.form, "files": [str(path) for path in files]},
        "speculative": run.stats(),
        "reported": dict(run.reported),
        "definitions": run.meanings(),
        "notices": list(run.notices),
        "gates": [],
    }


def print_imported(console: Console, document: Mapping[str, Any]) -> None:
    """Print counts, rates by position, the tool's own figures, notices and gates."""
    source, found = document["source"], document["speculative"]
    console.print(Text(f"{source['tool']}: {source['form']}"), soft_wrap=True)
    if found is not None:
        grid = Grid("drafting steps", "drafted", "accepted", "rate", "length")
        counts = [found[name] for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")]
        cells = [NOTHING if count is None else str(count) for count in counts]
        grid.add_row(*cells, percent(found["acceptance_rate"]), number(found["acceptance_length"]))
        console.print(grid)
        rates = found["per_position_acceptance_rates"]
        if rates:
            console.print(Text(f"accepted at position 1, 2, ...: {' '.join(map(percent, rates))}"), soft_wrap=True)
    if document["reported"]:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in document["reported"].items())
        console.print(Text(f"as {source['tool']} reports: {shown}"), soft_wrap=True)
    for notice in document["notices"]:
        console.print(Text(f"note: {notice}", style="yellow"), soft_wrap=True)
    for gate in document["gates"]:
        style, word = ("green", "passed") if gate["passed"] else ("bold red", "FAILED")
        console.print(Text(f"gate {word}: fail if {gate['expression']}: {gate['reason']}", style=style), soft_wrap=True)
