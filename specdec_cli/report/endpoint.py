"""A server's measurement in sentences and tables, the same on a terminal, on a page and in files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec_cli.measure.endpoint.endpoint_plan import pace_words
from specdec_cli.quantities import counted
from specdec_cli.report.columns import PageTable, TableColumn, interval_paths, named_rows
from specdec_cli.report.table import NOTHING, number, percent, rank_words

Document = Mapping[str, Any]

LEGEND = (
    "In milliseconds; in brackets: 95 % intervals of the median, by bootstrap over prompts. A chunk may hold several "
    "tokens."
)

FIGURE_NAMES = {
    "ttft_s": "to the first text",
    "tpot_s": "per token after it",
    "itl_s": "between chunks",
    "latency_s": "whole answer",
    "queue_s": "arrival to sending",
    "arrival_ttft_s": "arrival to first text",
    "arrival_latency_s": "arrival to whole answer",
}


def requests_words(body: Mapping[str, Any]) -> str:
    """`16 of 16 requests answered, 4 at a time`."""
    requests, plan = body["requests"], body["plan"]
    pace = pace_words(plan["concurrency"], plan["request_rate"])
    return f"{requests['answered']} of {counted(requests['planned'], 'request')} answered, {pace}"


def acceptance_words(acceptance: Mapping[str, Any] | None) -> str | None:
    """Acceptance as the answers report it, or None."""
    if acceptance is None:
        return None
    rate, length = acceptance["rate"], acceptance["length"]
    rate_ends = f" ({percent(rate['ci95'][0])}–{percent(rate['ci95'][1])})" if rate["ci95"] else ""
    length_ends = f" ({number(length['ci95'][0])}–{number(length['ci95'][1])})" if length["ci95"] else ""
    answers = "1 answer's" if acceptance["requests"] == 1 else f"{acceptance['requests']} answers'"
    message = f"Acceptance by {answers} own counts: rate {percent(rate['median'])}{rate_ends}"
    by_position = _position_words(acceptance.get("speculative") or {})
    return f"{message}, length {number(length['median'])}{length_ends}{by_position}."


def acceptance_lines(document: Document) -> list[str]:
    """Acceptance by the answers' own counts, and by the server's counters as far as answers do not tell it."""
    own = acceptance_words(document["acceptance"])
    has_own = document.get("acceptance_from") == "answers"
    return [*([own] if own else []), *counter_lines(document["counters"], has_own=has_own)]


def _position_words(counts: Mapping[str, Any]) -> str:
    rates = counts.get("per_position_acceptance_rates")
    words = f"; at position 1…k: {' '.join(map(percent, rates))}" if rates else ""
    if counts.get("num_draft_nodes") is not None:
        words += f"; {counted(counts['num_draft_nodes'], 'node')} of trees"
        if counts["acceptance_by_rank"]:
            words += f", accepted by rank 1, 2, …: {rank_words(counts['acceptance_by_rank'])}"
    return words


def milliseconds(seconds: float | None) -> str:
    """Milliseconds with as many digits as they are good for, or a dash."""
    return NOTHING if seconds is None else f"{1000 * seconds:.{2 if seconds < 0.1 else 0}f}"


def throughput_words(body: Mapping[str, Any]) -> str:
    """Tokens and requests per second, and what they rest on."""
    output, rates = body["output"], body["throughput"]
    requests = f"{number(rates['requests_per_second'])} requests/s"
    if output["tokens"] is None:
        return f"Throughput: {requests} over {rates['seconds']:.1f} s."
    chunks = counted(output["chunks"], "chunk")
    return (
        f"Throughput: {number(rates['output_tokens_per_second'], 1)} output tokens/s, {requests}: "
        f"{counted(output['tokens'], 'token')} (by {output['counted_by']}, in {chunks}) in {rates['seconds']:.1f} s."
    )


def counter_lines(counters: Mapping[str, Any] | None, *, has_own: bool = False) -> list[str]:
    """The server's own counts, in words; without those of speculation where the answers have their own."""
    if counters is None:
        return []
    head, lines = f"{counters['engine']}'s {counters['source']}", []
    counts = counters["speculative"]
    if counts is not None and not has_own:
        drafted, accepted = (
            NOTHING if counts[key] is None else counts[key] for key in ("num_draft_tokens", "num_accepted_tokens")
        )
        drafted = f"{drafted} {'token' if drafted == 1 else 'tokens'} drafted, {accepted} accepted"
        steps = "" if counts["num_drafts"] is None else f" in {counted(counts['num_drafts'], 'step')}"
        lines.append(
            f"Speculation by {head}: {drafted}{steps}: rate {percent(counts['acceptance_rate'])}, "
            f"length {number(counts['acceptance_length'])}{_position_words(counts)}."
        )
    if counters["gauges"]:
        shown = ", ".join(
            f"{name} {NOTHING if value is None else format(value, 'g')}" for name, value in counters["gauges"].items()
        )
        lines.append(f"Gauges of {head}, of its last moments: {shown}.")
    return lines


_TASK_FIGURES = ("ttft_s", "tpot_s", "latency_s")


def _with_interval(figure: Mapping[str, Any]) -> str:
    ends = "" if figure["ci95"] is None else f" ({milliseconds(figure['ci95'][0])}–{milliseconds(figure['ci95'][1])})"
    return f"{milliseconds(figure['median'])}{ends}"


TIME_COLUMNS = (
    TableColumn("", "name", FIGURE_NAMES.__getitem__),
    TableColumn("median (95 %)", "figure", _with_interval),
    TableColumn("p95", "figure.p95", milliseconds),
    TableColumn("p99", "figure.p99", milliseconds),
)
PART_COLUMNS = (
    TableColumn("prompts", "num_prompts"),
    TableColumn("output tokens", "output_tokens"),
    *(TableColumn(FIGURE_NAMES[name], f"timing.{name}", _with_interval) for name in _TASK_FIGURES),
    TableColumn("accepted", "acceptance.rate.median", percent),
    TableColumn("length", "acceptance.length.median", number),
)
_GROUP_FIGURES = ("ttft_s", "tpot_s")
GROUP_COLUMNS = (
    PART_COLUMNS[0],
    *(TableColumn(FIGURE_NAMES[name], f"timing.{name}", _with_interval) for name in _GROUP_FIGURES),
    *PART_COLUMNS[-2:],
)
ERROR_COLUMNS = (
    TableColumn("prompt", "index"),
    TableColumn("status", "status", lambda status: "" if status is None else str(status)),
    TableColumn("error", "message"),
)


def endpoint_findings(document: Document) -> list[str]:
    """The findings, throughput first."""
    return [throughput_words(document), f"{requests_words(document)}.", *acceptance_lines(document)]


def endpoint_facts(document: Document) -> list[tuple[str, str]]:
    """How it was measured, each with its name."""
    workload, plan, machine = document["workload"], document["plan"], document["machine"]
    endpoint, environment = document["endpoint"], document["environment"]
    pace = pace_words(plan["concurrency"], plan["request_rate"])
    server = " ".join(word for word in (endpoint["server"], endpoint["version"]) if word)
    cores = counted(machine["num_cores"], "core")
    load = f"{machine['load_before']:.1f} before, {machine['load_after']:.1f} after, {cores}"
    between = [("between", endpoint["proxy"])] if endpoint["proxy"] else []
    return [
        ("server", f"{endpoint['url']}{f', {server}' if server else ''}"),
        *between,
        (
            "workload",
            f"{counted(workload['num_prompts'], 'prompt')} of {workload['dataset']}{', as chats' * plan['chat']}",
        ),
        ("plan", f"{counted(plan['repeats'], 'repeat')}, {pace}{', interrupted' if plan['interrupted'] else ''}"),
        ("client", f"{environment.get('platform', NOTHING)}, load {load}"),
        ("made", f"{document['created']} by specdec {document['specdec_version']}"),
    ]


def endpoint_tables(document: Document) -> Iterator[PageTable]:
    """Times, tasks, turns and errors."""
    times = [{"name": name, "figure": figure} for name, figure in document["timing"].items()]
    yield PageTable.of("Times in milliseconds", TIME_COLUMNS, times)
    yield from part_tables(document)
    if document["errors"]:
        yield PageTable.of("Failed requests", ERROR_COLUMNS, document["errors"])


def groups_table(document: Document) -> PageTable | None:
    """A row for each value of the column of `--by`; None without that option."""
    by = document["plan"].get("by")
    if by is None:
        return None
    return PageTable.of("", (TableColumn(by, "name"), *GROUP_COLUMNS), named_rows(document["by_task"]))


def part_tables(document: Document) -> Iterator[PageTable]:
    """Tasks and turns."""
    for title, name in (("Tasks", "task"), ("Turns", "turn")):
        if parts := document[f"by_{name}"]:
            yield PageTable.of(title, (TableColumn(name, "name"), *PART_COLUMNS), named_rows(parts))


def endpoint_csv(document: Document) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Columns and rows: all requests together, then one row for each task and each turn; times in seconds."""
    columns = {name: name for name in ("task", "turn", "num_prompts", "output_tokens")}
    columns |= {name: f"throughput.{name}" for name in ("output_tokens_per_second", "requests_per_second")}
    columns |= {f"acceptance_{name}": f"acceptance.{name}.median" for name in ("rate", "length")}
    for figure in document["timing"]:
        columns |= interval_paths(figure, f"timing.{figure}")
        columns |= {f"{figure}_{name}": f"timing.{figure}.{name}" for name in ("p95", "p99")}
    counts = {"num_prompts": document["workload"]["num_prompts"], "output_tokens": document["output"]["tokens"]}
    rows = [{"task": "", "turn": "", **document, **counts}]
    rows += [{"task": task, "turn": "", **part} for task, part in document["by_task"].items()]
    return columns, rows + [{"task": "", "turn": turn, **part} for turn, part in document["by_turn"].items()]


def acceptance_by_position(document: Document) -> list[tuple[str, Sequence[float | None]]]:
    """Acceptance by position from the answers' own counts, else from the server's counters."""
    own = (document["acceptance"] or {}).get("speculative") or {}
    counted = own if own.get("per_position_acceptance_rates") else (document["counters"] or {}).get("speculative") or {}
    kinds = {"per_position": "all up to this position", "conditional": "this position, given those before"}
    return [(name, counted.get(f"{kind}_acceptance_rates") or []) for kind, name in kinds.items()]
