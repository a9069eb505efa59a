"""The report of `bench --endpoint --slo`: how many users at once, and what limits, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec_cli.measure.endpoint.slo import parse_slo
from specdec_cli.quantities import counted
from specdec_cli.report.columns import PageTable, TableColumn
from specdec_cli.report.result import grid_of, print_notes_and_gates
from specdec_cli.report.table import NOTHING, percent

_LEGEND = "Times and rates: what 90 % of the requests reach."
_ARMS = {"draft": "With the draft", "plain": "Without"}


def capacity_words(name: str, capacity: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """The number of users of an arm, and the objective that limits it with the value at the next number."""
    users = counted(capacity["users"], "user")
    if not capacity["is_bound"]:
        return f"{_ARMS[name]}: at least {users} at once; no more were tried (--concurrency)."
    failed = min(level["users"] for level in capacity["levels"] if level["users"] > capacity["users"])
    level = next(level for level in capacity["levels"] if level["users"] == failed)
    limit = capacity["limited_by"]
    if limit == "failures":
        why = f"{level['failed']} of {counted(level['requests'], 'request')} failed"
    else:
        (objective,) = parse_slo(limit)
        reached = level["reached"][limit]
        value = "no request has it" if reached is None else f"90 % of requests reach {objective.shown(reached)}"
        why = f"{limit} limits: {value}, and {percent(level['met'])} of them meet every objective"
    return f"{_ARMS[name]}: {users} at once. At {failed}, {why}."


def slo_words(body: Mapping[str, Any]) -> list[str]:
    """The answer in sentences."""
    head = f"Users at once for {body['share']:.0%} of requests with {' and '.join(body['objectives'])}:"
    return [head, *(capacity_words(name, body[name], body) for name in _ARMS)]


def slo_table(body: Mapping[str, Any]) -> PageTable:
    """Every number of users that was tried."""
    objectives = {objective.text: objective for objective in parse_slo(",".join(body["objectives"]))}
    columns = [
        TableColumn("arm", "arm"),
        TableColumn("users", "users"),
        TableColumn("requests", "requests"),
        TableColumn("failed", "failed"),
        TableColumn("meet all", "met", percent),
        *(
            TableColumn(
                objective.name,
                "reached",
                lambda reached, objective=objective: (  # type: ignore[misc]
                    NOTHING if reached[objective.text] is None else objective.shown(reached[objective.text])
                ),
            )
            for objective in objectives.values()
        ),
    ]
    rows = [{"arm": name, **level} for name in _ARMS for level in body[name]["levels"]]
    return PageTable.of("", columns, rows)


def print_slo(console: Console, body: Mapping[str, Any]) -> None:
    """Print the answer, every number of users that was tried, notes and gates."""
    for sentence in slo_words(body):
        console.print(Text(sentence, style="bold"), soft_wrap=True)
    console.print(grid_of(slo_table(body)))
    console.print(Text(_LEGEND, style="dim"), soft_wrap=True)
    print_notes_and_gates(console, body)
