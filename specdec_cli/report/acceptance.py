"""The report of a sweep through servers or over recorded text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec_cli.quantities import counted
from specdec_cli.report.columns import PageTable, TableColumn
from specdec_cli.report.result import grid_of, print_notes_and_gates
from specdec_cli.report.table import number, percent
from specdec_cli.verification import RULES

_NO_COSTS = (
    "Whether they pay depends on what drafting and verifying cost on that machine: measure its server with "
    "`bench --endpoint`."
)
_MEANINGS = {name: rule.meaning for name, rule in RULES.items()}
_MEANINGS["one-hot"] = "the draft's likeliest token, accepted with the target's probability of it"

RULE_COLUMNS = (
    TableColumn("k", "k"),
    TableColumn("tokens per step", "acceptance_length.median", number),
    TableColumn(
        "95 % interval", "acceptance_length.ci95", lambda ends: f"{ends[0]:.2f} to {ends[1]:.2f}" if ends else ""
    ),
    TableColumn("rate", "acceptance_rate.median", percent),
)


def print_acceptance(console: Console, document: Mapping[str, Any], details: bool) -> None:
    """Print acceptance by rule and k, and with `details` what the rules are and what it took to find out."""
    source = document["source"]
    console.print(Text(f"{document['draft']} for {document['target']}, {source['words']}"), soft_wrap=True)
    if details and "requests" in source:
        size = source["bytes"] / 1e6
        console.print(
            Text(f"{counted(source['requests'], 'request')}, {size:.2f} MB, {source['seconds']:.1f} s"), soft_wrap=True
        )
    for its in document["rules"]:
        rule, who = its["rule"], "; ".join(its["engines"])
        meaning = f": {_MEANINGS[rule]}" if details else ""
        console.print(Text(f"{rule}{meaning}{who and f' ({who})'}"), soft_wrap=True)
        rows = [row for row in document["rows"] if row["rule"] == rule]
        console.print(grid_of(PageTable.of("", RULE_COLUMNS, rows)))
    console.print(_NO_COSTS, soft_wrap=True)
    print_notes_and_gates(console, document)
    if not details:
        console.print(Text("--details adds what the rules mean and what the trace took", style="dim"), soft_wrap=True)
