"""The report of `audit --endpoint` and `audit --tools`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec_cli.quantities import counted
from specdec_cli.report.columns import PageTable, TableColumn, named_rows
from specdec_cli.report.result import grid_of, print_notes_and_gates
from specdec_cli.report.table import NOTHING, percent

_MOST_SHOWN = 20


def _valid(key: str) -> TableColumn:
    head = "valid with" if key == "valid_with_draft" else "without"
    return TableColumn(head, "", lambda kind: f"{kind[key]} of {kind['checked']}" if kind["checked"] else NOTHING)


KIND_COLUMNS = (
    TableColumn("answers", "name"),
    TableColumn("requests", "requests"),
    TableColumn("equal", "equal"),
    TableColumn("near ties", "near_ties"),
    TableColumn("damaged", "damaged", style=lambda cell: "green" if cell == "0" else "bold red"),
    TableColumn("unknown", "unknown"),
    _valid("valid_with_draft"),
    _valid("valid_without"),
)


def verdict_words(body: Mapping[str, Any]) -> str:
    """The verdict in a sentence."""
    kinds = body["by_kind"].values()
    num, ties = sum(kind["requests"] for kind in kinds), sum(kind["near_ties"] for kind in kinds)
    odd = len(body["differences"]) - ties
    if odd:
        return f"FAIL: {odd} of {num} answers differ with the draft, and not at a near tie"
    tail = f"; near ties: {ties}" if ties else ""
    if body["verdict"] == "inconclusive":
        return f"INTERRUPTED: {num} of {body['num_requests']} answers were compared, {num - ties} of them equal{tail}"
    return f"PASS: {num - ties} of {num} answers are equal with and without the draft{tail}"


def print_request_audit(console: Console, body: Mapping[str, Any]) -> None:
    """Print the verdict, a row for each kind of request, and every request that differs."""
    style = {"fail": "bold red", "pass": "bold green"}.get(body["verdict"], "yellow")
    console.print(Text(verdict_words(body), style=style), soft_wrap=True)
    console.print(grid_of(PageTable.of("", KIND_COLUMNS, named_rows(body["by_kind"]))))
    if body["num_draft_tokens"]:
        rate = percent(body["num_accepted_tokens"] / body["num_draft_tokens"])
        console.print(Text(f"{counted(body['num_draft_tokens'], 'token')} drafted, {rate} accepted."), soft_wrap=True)
    for each in body["differences"][:_MOST_SHOWN]:
        named = f" ({each['id']})" if each["id"] is not None else ""
        place = "" if each["position"] is None else f" at token {each['position'] + 1}"
        gap = "" if each["gap_nats"] is None else f", {each['gap_nats']:.4f} nats apart"
        head = f"request {each['index'] + 1}{named}, {each['kind']}: {each['class']}{place}{gap}"
        console.print(Text(head, style="yellow" if each["class"] == "near-tie" else "bold red"), soft_wrap=True)
        for name, key in (("with the draft", "with_draft"), ("without", "without")):
            console.print(Text(f"  {name}: {each[key]!r}"), soft_wrap=True)
    if len(body["differences"]) > _MOST_SHOWN:
        console.print(Text(f"… and {len(body['differences']) - _MOST_SHOWN} more (--json lists all)"))
    print_notes_and_gates(console, body)
