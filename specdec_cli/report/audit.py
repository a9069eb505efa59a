"""Reports of `audit`: comparisons, drawn distributions, every difference, and the verdict, all from its document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec_cli.measure.documents.audit import FALSE_ALARM
from specdec_cli.quantities import counted
from specdec_cli.report.columns import PageTable, TableColumn, origin
from specdec_cli.report.result import grid_of, print_notes_and_gates
from specdec_cli.report.table import NOTHING

LEGEND = (
    "run: one configuration (draft, k, batch size) over a few prompts. drafted, accepted: the draft's tokens. "
    "outcomes: possible results of a draw. p-value: probability of a chi-square this large if the output is exact; "
    "below 1e-6 the test fails. finds a shift of: smallest change in total variation that these draws detect with "
    "99 % probability."
)
_MAX_SHOWN = 20
_EQUALITY, _MISMATCHES, _DISTRIBUTION = (
    "Equal to plain decoding, one sequence at a time",
    "First difference of each output",
    "Sampled tokens against the exact distribution",
)


def _token(token: int | None) -> str:
    return "end" if token is None else str(token)


def _gap(gap: float | None) -> str:
    return NOTHING if gap is None else f"{gap:.2g}"


def _place(place: int) -> str:
    return str(place + 1)


def _preference(recheck: Mapping[str, Any] | None) -> str:
    return NOTHING if recheck is None else f"{recheck['prefers']} (gap {recheck['top2_gap']:.2g})"


EQUALITY_COLUMNS = (
    TableColumn("mode", "mode"),
    TableColumn("prompts", "prompts"),
    TableColumn("runs", "", lambda one: f"{one['runs']} of {one['planned_runs']}"),
    TableColumn("tokens", "tokens"),
    TableColumn("drafted", "num_draft_tokens"),
    TableColumn("accepted", "num_accepted_tokens"),
    TableColumn("different outputs", "mismatches", style=lambda cell: "green" if cell == "0" else "bold red"),
)
MISMATCH_COLUMNS = (
    TableColumn("prompt", "prompt", _place),
    TableColumn("token", "position", _place),
    TableColumn("configuration", "configuration"),
    TableColumn("expected", "expected", _token),
    TableColumn("got", "got", _token),
    TableColumn("top-2 gap", "top2_gap", _gap),
    TableColumn("rounding explains", "tolerance", _gap),
    TableColumn("class", "class", style=lambda cell: "yellow" if cell == "near-tie" else "bold red"),
    TableColumn("float32 prefers", "float32", _preference),
)
DISTRIBUTION_COLUMNS = (
    TableColumn("configuration", "configuration"),
    TableColumn("draws", "draws"),
    TableColumn("outcomes", "cells"),
    TableColumn("drafted", "num_draft_tokens"),
    TableColumn("accepted", "num_accepted_tokens"),
    TableColumn("chi-square / dof", "", lambda one: _statistic(one)),
    TableColumn("p-value", "p_value", "{:.3g}".format, lambda p: "green" if float(p) >= FALSE_ALARM else "bold red"),
    TableColumn("finds a shift of", "detectable_shift", lambda shift: f"{100 * shift:.1f} %"),
)


def _statistic(test: Mapping[str, Any]) -> str:
    statistic = test["statistic"]
    return "impossible outcome" if statistic is None else f"{statistic:.1f} / {test['degrees_of_freedom']}"


def print_audit(console: Console, body: Mapping[str, Any]) -> None:
    """Print the report of an audit's document."""
    style = "bold red" if body["verdict"] == "fail" else "bold yellow" if is_partial(body) else "bold green"
    console.print(Text(verdict_words(body), style=style), soft_wrap=True)
    tables = audit_tables(body)
    for table in tables:
        console.print(grid_of(table))
        if table.title == _MISMATCHES and len(body["mismatches"]) > _MAX_SHOWN:
            console.print(Text(f"… and {len(body['mismatches']) - _MAX_SHOWN} more (--json lists all)"))
    if tables:
        console.print(Text(LEGEND, style="dim"), soft_wrap=True)
    print_notes_and_gates(console, body)


def is_partial(body: Mapping[str, Any]) -> bool:
    """Whether the time limit left out some of the planned runs."""
    return bool(body["checked"]["runs"] < body["checked"]["planned_runs"])


def runs_words(body: Mapping[str, Any]) -> str:
    """`12 of 111 runs`, or `111 runs`."""
    checked = body["checked"]
    return (
        f"{checked['runs']} of {counted(checked['planned_runs'], 'run')}"
        if is_partial(body)
        else counted(checked["runs"], "run")
    )


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
    checked = document["checked"]
    return [
        ("modes", document["mode"]),
        ("runs", runs_words(document)),
        (
            "compared",
            f"{counted(checked['tokens'], 'token')} of {counted(checked['prompts'], 'prompt')}; "
            f"{counted(checked['draws'], 'draw')}",
        ),
        *origin(document),
    ]


def audit_cases(document: Mapping[str, Any]) -> Iterator[tuple[str, bool | None, str]]:
    """Every check: its name, whether it passed (None: it did not run completely), and what was found."""
    for check in document["equality"]:
        result = f"{check['mismatches']} of {check['tokens']} tokens begin a difference from plain decoding"
        yield f"{check['mode']}: tokens equal plain decoding", not check["mismatches"], result
    for check in document["distribution"]:
        result = f"p = {check['p_value']:.3g} of {check['draws']} draws"
        yield f"distribution: {check['configuration']}", check["p_value"] >= FALSE_ALARM, result
    partial = is_partial(document)
    yield "all planned runs", None if partial else True, runs_words(document)


def audit_tables(body: Mapping[str, Any]) -> list[PageTable]:
    """The tables that have rows."""
    tables = (
        PageTable.of(_EQUALITY, EQUALITY_COLUMNS, body["equality"]),
        PageTable.of(_MISMATCHES, MISMATCH_COLUMNS, body["mismatches"][:_MAX_SHOWN]),
        PageTable.of(_DISTRIBUTION, DISTRIBUTION_COLUMNS, body["distribution"]),
    )
    return [table for table in tables if table.rows]
