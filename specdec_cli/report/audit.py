"""Reports of `audit`: comparisons, drawn distributions, every difference, and the verdict, all from its document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec_cli.report.grid import Grid
from specdec_cli.report.schema import read_schema
from specdec_cli.report.table import NOTHING, PageTable

SCHEMA = "specdec.audit/1"
LEGEND = (
    "run: one configuration (draft, k, batch size) over a few prompts. drafted, accepted: the draft's tokens. "
    "outcomes: possible results of a draw. p-value: probability of a chi-square this large if the output is exact; "
    "below 1e-6 the test fails. finds a shift of: smallest change in total variation that these draws detect with "
    "99 % probability."
)
_MAX_SHOWN = 20
_FALSE_ALARM = 1e-6
_EQUALITY, _MISMATCHES, _DISTRIBUTION = (
    "Equal to plain decoding, one sequence at a time",
    "First difference of each output",
    "Sampled tokens against the exact distribution",
)
_Styles = Mapping[int, Callable[[str], str]]
_STYLES: Mapping[str, _Styles] = {
    _EQUALITY: {6: lambda cell: "green" if cell == "0" else "bold red"},
    _MISMATCHES: {7: lambda cell: "yellow" if cell == "near-tie" else "bold red"},
    _DISTRIBUTION: {6: lambda cell: "green" if float(cell) >= _FALSE_ALARM else "bold red"},
}


def print_audit(console: Console, body: Mapping[str, Any]) -> None:
    """Print the report of an audit's document."""
    style = "bold red" if body["verdict"] == "fail" else "bold yellow" if is_partial(body) else "bold green"
    console.print(Text(verdict_words(body), style=style), soft_wrap=True)
    found = audit_tables(body)
    for one in found:
        table, styles = Grid(*one.heads, title=one.title), _STYLES[one.title]
        for row in one.rows:
            table.add_row(*(Text(cell, style=styles[i](cell) if i in styles else "") for i, cell in enumerate(row)))
        console.print(table)
        if one.title == _MISMATCHES and len(body["mismatches"]) > _MAX_SHOWN:
            console.print(Text(f"… and {len(body['mismatches']) - _MAX_SHOWN} more (--json lists all)"))
    if found:
        console.print(Text(LEGEND, style="dim"), soft_wrap=True)
    for notice in body["notices"]:
        console.print(Text(f"note: {notice}", style="yellow"), soft_wrap=True)


def is_partial(body: Mapping[str, Any]) -> bool:
    """Whether the time limit left out some of the planned runs."""
    return bool(body["checked"]["runs"] < body["checked"]["planned_runs"])


def runs_words(body: Mapping[str, Any]) -> str:
    """`12 of 111 runs`, or `111 runs`."""
    checked = body["checked"]
    return f"{checked['runs']} of {checked['planned_runs']} runs" if is_partial(body) else f"{checked['runs']} runs"


def verdict_words(body: Mapping[str, Any]) -> str:
    """The verdict in a sentence; a partial audit says how much of it ran."""
    partial = f"partial: {runs_words(body)}" if is_partial(body) else None
    if body["verdict"] == "pass":
        head = "PASS" if partial is None else f"PASS, {partial}"
        return f"{head}: no difference found ({body['seconds']:.0f} s)"
    tail = "" if partial is None else f"; {partial}"
    return f"FAIL: the output is not what the target alone produces ({body['seconds']:.0f} s{tail})"


def audit_facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How it was audited, each with its name."""
    checked, environment = document["checked"], document["environment"]
    named = ("platform", "device", "dtype", "threads", "torch", "transformers", "python")
    return [
        ("modes", document["mode"]),
        ("runs", runs_words(document)),
        ("compared", f"{checked['tokens']} tokens of {checked['prompts']} prompts; {checked['draws']} draws"),
        ("machine", ", ".join(f"{name} {environment[name]}" for name in named if environment.get(name) is not None)),
        ("made", f"{document['created']} by specdec {document['specdec_version']}"),
    ]


def audit_cases(document: Mapping[str, Any]) -> Iterator[tuple[str, bool | None, str]]:
    """Every check: its name, whether it passed (None: it did not run completely), and what was found."""
    for one in document["equality"]:
        found = f"{one['mismatches']} of {one['tokens']} tokens begin a difference from plain decoding"
        yield f"{one['mode']}: tokens equal plain decoding", not one["mismatches"], found
    for one in document["distribution"]:
        found = f"p = {one['p_value']:.3g} of {one['draws']} draws"
        yield f"distribution: {one['configuration']}", one["p_value"] >= _FALSE_ALARM, found
    partial = is_partial(document)
    yield "all planned runs", None if partial else True, runs_words(document)


def audit_tables(body: Mapping[str, Any]) -> list[PageTable]:
    """The tables that have rows."""
    tables = (
        PageTable(
            _EQUALITY,
            ("mode", "prompts", "runs", "tokens", "drafted", "accepted", "different outputs"),
            [_equality_row(one) for one in body["equality"]],
        ),
        PageTable(
            _MISMATCHES,
            (
                *("prompt", "token", "configuration", "expected", "got", "top-2 gap", "rounding explains", "class"),
                "float32 prefers",
            ),
            [_mismatch_row(one) for one in body["mismatches"][:_MAX_SHOWN]],
        ),
        PageTable(
            _DISTRIBUTION,
            (
                *("configuration", "draws", "outcomes", "drafted", "accepted", "chi-square / dof", "p-value"),
                "finds a shift of",
            ),
            [_distribution_row(one) for one in body["distribution"]],
        ),
    )
    return [table for table in tables if table.rows]


def _equality_row(one: Mapping[str, Any]) -> Sequence[str]:
    names = ("tokens", "num_draft_tokens", "num_accepted_tokens", "mismatches")
    runs = f"{one['runs']} of {one['planned_runs']}"
    return [one["mode"], str(one["prompts"]), runs, *(str(one[name]) for name in names)]


def _mismatch_row(one: Mapping[str, Any]) -> Sequence[str]:
    recheck = one["float32"]
    return [
        str(one["prompt"] + 1),
        str(one["position"] + 1),
        one["configuration"],
        _token(one["expected"]),
        _token(one["got"]),
        _gap(one["top2_gap"]),
        _gap(one["tolerance"]),
        one["class"],
        NOTHING if recheck is None else f"{recheck['prefers']} (gap {recheck['top2_gap']:.2g})",
    ]


def _distribution_row(one: Mapping[str, Any]) -> Sequence[str]:
    statistic = (
        "impossible outcome" if one["statistic"] is None else f"{one['statistic']:.1f} / {one['degrees_of_freedom']}"
    )
    return [
        one["configuration"],
        str(one["draws"]),
        str(one["cells"]),
        str(one["num_draft_tokens"]),
        str(one["num_accepted_tokens"]),
        statistic,
        f"{one['p_value']:.3g}",
        f"{100 * one['detectable_shift']:.1f} %",
    ]


def _token(token: int | None) -> str:
    return "end" if token is None else str(token)


def _gap(gap: float | None) -> str:
    return NOTHING if gap is None else f"{gap:.2g}"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the whole document."""
    return read_schema("audit")
