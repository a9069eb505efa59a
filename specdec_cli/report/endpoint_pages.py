"""A server's measurement in tables, sentences and pictures, for pages and files; all of it from the document alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec_cli.measure.endpoint.endpoint_plan import pace_words
from specdec_cli.report.endpoint_words import (
    FIGURE_NAMES,
    acceptance_words,
    counter_lines,
    milliseconds,
    requests_words,
    throughput_words,
)
from specdec_cli.report.table import NOTHING, PageTable, percent

Document = Mapping[str, Any]

_TASK_FIGURES = ("ttft_s", "tpot_s", "latency_s")
_PART_HEADS = ("prompts", "output tokens", *(FIGURE_NAMES[name] for name in _TASK_FIGURES), "accepted")
_TOTALS = ("output_tokens_per_second", "requests_per_second", "acceptance_rate", "acceptance_length")
_COLUMNS = ("median", "low", "high", "p95", "p99")


def endpoint_findings(document: Document) -> list[str]:
    """The findings, throughput first."""
    accepted = acceptance_words(document["acceptance"])
    return [
        throughput_words(document),
        f"{requests_words(document)}.",
        *([accepted] if accepted else []),
        *counter_lines(document["counters"]),
    ]


def endpoint_facts(document: Document) -> list[tuple[str, str]]:
    """How it was measured, each with its name."""
    workload, plan, machine = document["workload"], document["plan"], document["machine"]
    endpoint, environment = document["endpoint"], document["environment"]
    repeats = "1 repeat" if plan["repeats"] == 1 else f"{plan['repeats']} repeats"
    pace = pace_words(plan["concurrency"], plan["request_rate"])
    server = " ".join(word for word in (endpoint["server"], endpoint["version"]) if word)
    load = f"{machine['load_before']:.1f} before, {machine['load_after']:.1f} after, {machine['num_cores']} cores"
    between = [("between", endpoint["proxy"])] if endpoint["proxy"] else []
    return [
        ("server", f"{endpoint['url']}{f', {server}' if server else ''}"),
        *between,
        ("workload", f"{workload['num_prompts']} prompts of {workload['dataset']}{', as chats' * plan['chat']}"),
        ("plan", f"{repeats}, {pace}{', interrupted' if plan['interrupted'] else ''}"),
        ("client", f"{environment.get('platform', NOTHING)}, load {load}"),
        ("made", f"{document['created']} by specdec {document['specdec_version']}"),
    ]


def endpoint_tables(document: Document) -> Iterator[PageTable]:
    """Times, tasks and errors."""
    rows = [
        [FIGURE_NAMES[name], _with_interval(found), milliseconds(found["p95"]), milliseconds(found["p99"])]
        for name, found in document["timing"].items()
    ]
    yield PageTable("Times in milliseconds", ("", "median (95 %)", "p95", "p99"), rows)
    if document["by_task"]:
        heads = ("task", *_PART_HEADS)
        yield PageTable("Tasks", heads, [_part_row(task, found) for task, found in document["by_task"].items()])
    if document["by_turn"]:
        heads = ("turn", *_PART_HEADS)
        yield PageTable("Turns", heads, [_part_row(turn, found) for turn, found in document["by_turn"].items()])
    if document["errors"]:
        failed = [
            [str(one["index"]), "" if one["status"] is None else str(one["status"]), one["message"]]
            for one in document["errors"]
        ]
        yield PageTable("Failed requests", ("prompt", "status", "error"), failed)


def _part_row(name: str, found: Mapping[str, Any]) -> list[str]:
    tokens, accepted = found["output_tokens"], found["acceptance"]
    return [
        name,
        str(found["num_prompts"]),
        NOTHING if tokens is None else str(tokens),
        *(_with_interval(found["timing"][name]) for name in _TASK_FIGURES),
        percent(accepted and accepted["rate"]["median"]),
    ]


def _with_interval(found: Mapping[str, Any]) -> str:
    ends = "" if found["ci95"] is None else f" ({milliseconds(found['ci95'][0])}–{milliseconds(found['ci95'][1])})"
    return f"{milliseconds(found['median'])}{ends}"


def endpoint_csv(document: Document) -> tuple[list[str], list[list[object]]]:
    """Heads and rows: all requests together, then one row for each task and each turn; times in seconds."""
    figures = list(document["timing"])
    heads = ["task", "turn", "num_prompts", "output_tokens", *_TOTALS]
    heads += [f"{figure}_{column}".removesuffix("_median") for figure in figures for column in _COLUMNS]
    whole = {
        "num_prompts": document["workload"]["num_prompts"],
        "output_tokens": document["output"]["tokens"],
        **document["throughput"],
        "timing": document["timing"],
        "acceptance": document["acceptance"],
    }
    rows = [_csv_row(task, "", found, figures) for task, found in {"": whole, **document["by_task"]}.items()]
    rows += [_csv_row("", turn, found, figures) for turn, found in document["by_turn"].items()]
    return heads, rows


def _csv_row(task: str, turn: str, found: Mapping[str, Any], figures: Sequence[str]) -> list[object]:
    accepted = found["acceptance"] or {}
    row = [task, turn, found["num_prompts"], found["output_tokens"], *(found.get(name) for name in _TOTALS[:2])]
    row += [accepted[name]["median"] if accepted else None for name in ("rate", "length")]
    for figure in figures:
        one = found["timing"][figure]
        low, high = one["ci95"] or (None, None)
        row += [one["median"], low, high, one["p95"], one["p99"]]
    return row


def acceptance_by_position(document: Document) -> list[tuple[str, Sequence[float | None]]]:
    """Acceptance by position from the server's counters."""
    counted = (document["counters"] or {}).get("speculative") or {}
    kinds = {"per_position": "all up to this position", "conditional": "this position, given those before"}
    return [(name, counted.get(f"{kind}_acceptance_rates") or []) for kind, name in kinds.items()]
