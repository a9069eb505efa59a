"""The document of a sweep through servers or over recorded text, `specdec.acceptance/1`, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec_cli.report.grid import Grid
from specdec_cli.report.table import number, percent

SCHEMA = "specdec.acceptance/1"
_NO_COSTS = (
    "Whether they pay depends on what drafting and verifying cost on that machine: measure its server with "
    "`bench --endpoint`."
)
_MEANINGS = {
    "greedy": "temperature 0: the target's likeliest token",
    "rejection": "rejection sampling, token by token",
    "block": "block verification",
    "one-hot": "the draft's likeliest token, accepted with the target's probability of it",
    "exact-match": "a sampled token of the draft, where the target draws the same one",
}


def print_acceptance(console: Console, document: Mapping[str, Any], details: bool) -> None:
    """Print acceptance by rule and k, and with `details` what the rules are and what it took to find out."""
    source = document["source"]
    console.print(Text(f"{document['draft']} for {document['target']}, {source['words']}"), soft_wrap=True)
    if details:
        print_source(console, source)
    for its in document["rules"]:
        rule, who = its["rule"], "; ".join(its["engines"])
        meaning = f": {_MEANINGS[rule]}" if details else ""
        console.print(Text(f"{rule}{meaning}{who and f' ({who})'}"), soft_wrap=True)
        grid = Grid("k", "tokens per step", "95 % interval", "rate")
        for row in (one for one in document["rows"] if one["rule"] == rule):
            length, ends = row["acceptance_length"]["median"], row["acceptance_length"]["ci95"]
            interval = "" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"
            grid.add_row(str(row["k"]), number(length), interval, percent(row["acceptance_rate"]["median"]))
        console.print(grid)
    console.print(_NO_COSTS, soft_wrap=True)
    for notice in document["notices"]:
        console.print(Text(f"note: {notice}", style="yellow"), soft_wrap=True)
    if not details:
        console.print(Text("--details adds what the rules mean and what the trace took", style="dim"), soft_wrap=True)


def print_source(console: Console, source: Mapping[str, Any]) -> None:
    """Print what a trace through servers took."""
    if "requests" in source:
        size = source["bytes"] / 1e6
        console.print(Text(f"{source['requests']} requests, {size:.2f} MB, {source['seconds']:.1f} s"), soft_wrap=True)
