"""The document of `bench --endpoint`, `specdec.bench-endpoint/1`, and its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.text import Text

from specdec_cli.measure.endpoint.endpoint_bench import ARRIVAL_FIGURES
from specdec_cli.measure.endpoint.endpoint_doubts import doubts
from specdec_cli.report.bench import json_schema as bench_schema
from specdec_cli.report.endpoint_words import (
    FIGURE_NAMES,
    LEGEND,
    acceptance_words,
    counter_lines,
    milliseconds,
    requests_words,
    throughput_words,
)
from specdec_cli.report.grid import Grid
from specdec_cli.report.result import print_result
from specdec_cli.report.schema import read_schema
from specdec_cli.report.table import NOTHING
from specdec_cli.text.printable import printable

if TYPE_CHECKING:
    from specdec_cli.measure.endpoint.endpoint_bench import EndpointBench

SCHEMA = "specdec.bench-endpoint/1"


def json_schema(has_arrivals: bool = True) -> dict[str, Any]:
    """The JSON Schema of the whole document; gates are `bench`'s.

    Args:
        has_arrivals: whether requests arrive at a rate, without which times from their arrival are not measured.
    """
    bench = bench_schema()
    schema = read_schema("bench-endpoint", bench)
    schema["properties"]["gates"] = bench["properties"]["gates"]
    timing = schema["$defs"]["timing"]["properties"]
    schema["$defs"]["timing"]["properties"] = {
        name: found for name, found in timing.items() if has_arrivals or name not in ARRIVAL_FIGURES
    }
    return schema


def endpoint_body(bench: EndpointBench, dataset: str, machine: Mapping[str, Any], interrupted: bool) -> dict[str, Any]:
    """The document's own fields, after those that every document has. `gates` is empty until the gates are judged.

    Args:
        bench: after its run.
        dataset: where the prompts came from.
        machine: this machine's load before and after.
        interrupted: whether it was ended early.
    """
    plan, tokens = bench.plan, bench.num_tokens()
    return {
        "workload": {"dataset": dataset, "num_prompts": len(bench.rows), "tasks": bench.tasks},
        "plan": {
            "concurrency": plan.concurrency,
            "request_rate": plan.request_rate if plan.has_arrivals else None,
            "arrival_seed": plan.seed if plan.has_arrivals else None,
            "repeats": plan.repeats,
            "chat": plan.chat,
            "fields": bench.arm.fields,
            "extra_body": dict(plan.extra_body),
            "max_tokens_field": plan.max_tokens_field,
            "timeout_s": plan.timeout_s,
            "interrupted": interrupted,
        },
        "endpoint": {
            "url": plan.address.root,
            "model": bench.arm.model,
            "model_from": plan.model_from,
            "server": bench.arm.server,
            "version": bench.arm.version,
            "proxy": None if bench.arm.proxy is None else str(bench.arm.proxy),
        },
        "machine": dict(machine),
        "requests": {
            "planned": bench.total,
            "answered": bench.num_answered,
            "failed": bench.num_failed,
            "not_sent": bench.sender.num_unsent,
            "sent_again": bench.num_sent_again,
            "most_at_a_time": bench.sender.most_open,
            "most_waiting": bench.sender.most_waiting,
        },
        "output": _output(bench),
        "timing": _timing(bench),
        "throughput": {
            "seconds": bench.seconds,
            "output_tokens_per_second": _rate(tokens, bench.seconds),
            "requests_per_second": _rate(bench.num_answered, bench.seconds),
            "client_cpu_share": bench.sender.cpu_seconds / bench.seconds if bench.seconds > 0 else None,
        },
        "by_task": {
            task: {
                "num_prompts": num,
                "output_tokens": bench.num_tokens(task),
                "timing": _timing(bench, task),
                "acceptance": bench.acceptance(task),
            }
            for task, num in bench.tasks.items()
        },
        "by_turn": _by_turn(bench),
        "acceptance": bench.acceptance(),
        "counters": bench.counters.as_dict(),
        "errors": _errors(bench),
        "notices": _notices(bench),
        "gates": [],
    }


def _rate(count: int | None, seconds: float) -> float | None:
    return count / seconds if count is not None and seconds > 0 else None


def _timing(bench: EndpointBench, task: str | None = None, turn: int | None = None) -> dict[str, Any]:
    return {figure: bench.distribution(figure, task, turn).as_dict() for figure in bench.figures}


def _by_turn(bench: EndpointBench) -> dict[str, Any]:
    """The figures of each turn; none where every prompt is one turn."""
    turns = bench.turns
    return {
        str(turn): {
            "num_prompts": num,
            "output_tokens": bench.num_tokens(turn=turn),
            "timing": _timing(bench, turn=turn),
            "acceptance": bench.acceptance(turn=turn),
        }
        for turn, num in turns.items()
        if len(turns) > 1
    }


def _output(bench: EndpointBench) -> dict[str, Any]:
    answers = [answer for _, answer in bench.answers()]
    prompts = [answer.prompt_tokens for answer in answers if answer.prompt_tokens is not None]
    tokens = bench.num_tokens()
    return {
        "tokens": tokens,
        "counted_by": None if tokens is None else "the server's usage",
        "prompt_tokens": sum(prompts) if len(prompts) == len(answers) else None,
        "chunks": sum(len(answer.arrivals) for answer in answers),
        "finish_reasons": dict(Counter(printable(answer.finish_reason or "none")[:40] for answer in answers)),
    }


def _errors(bench: EndpointBench) -> list[dict[str, Any]]:
    return [
        {
            "index": visit.row.index,
            "id": visit.row.id,
            "turn": visit.turn,
            "repeat": visit.repeat,
            "status": visit.error.status,
            "message": visit.error.message,
        }
        for visit in bench.visits
        if visit.error is not None
    ]


def _notices(bench: EndpointBench) -> list[str]:
    notices = []
    if bench.arm.proxy is not None:
        notices.append(f"every request went through the {bench.arm.proxy}, and its time is in the figures")
    if bench.num_failed:
        notices.append(f"{bench.num_failed} of {len(bench.visits)} requests failed; the figures are of the others")
    if bench.sender.num_unsent:
        notices.append(
            f"{bench.sender.num_unsent} turns were not sent, because the turn before them failed or called a tool"
        )
    if bench.num_sent_again:
        notices.append(
            f"the server closed {bench.num_sent_again} connections before it answered; those requests were sent again, "
            "and their times include both attempts"
        )
    if bench.plan.repeats > 1:
        notices.append(
            "every prompt was sent several times: a server with prefix caching answers faster after the first time"
        )
    return [*notices, *doubts(bench), *bench.counters.notices]


def live_table(bench: EndpointBench) -> RenderableType:
    """The answers so far, without intervals."""
    table = Grid("answered", "failed", "output tokens", "first text ms", "per token ms", "answer ms")
    answers = [answer for _, answer in bench.answers()]
    figures = (
        [answer.ttft_s for answer in answers],
        [answer.tpot_s for answer in answers],
        [answer.end_s for answer in answers],
    )
    tokens = bench.num_tokens()
    shown = [
        f"{bench.num_answered} of {bench.total}",
        str(bench.num_failed),
        NOTHING if tokens is None else str(tokens),
    ]
    for values in figures:
        known = [value for value in values if value is not None]
        shown.append(milliseconds(median(known) if known else None))
    table.add_row(*shown)
    return table


def print_endpoint(console: Console, body: Mapping[str, Any], details: bool) -> None:
    """Print the report."""

    def further() -> Iterator[RenderableType | str]:
        yield LEGEND
        if body["by_task"]:
            yield _parts_table("task", body["by_task"])
        if body["by_turn"]:
            yield _parts_table("turn", body["by_turn"])

    verdict, figures = [throughput_words(body)], [Text(_head(body)), _figures_table(body["timing"])]
    checks = [acceptance_words(body["acceptance"]), *counter_lines(body["counters"])]
    print_result(console, body, verdict, figures, checks, further if details else None, "every task and turn")
    for message, num in Counter(error["message"] for error in body["errors"]).items():
        console.print(Text(f"failed, {num}×: {message}", style="red"), soft_wrap=True)


def _head(body: Mapping[str, Any]) -> str:
    endpoint = body["endpoint"]
    told = " ".join(word for word in (endpoint["server"], endpoint["version"]) if word)
    name = f"`{printable(endpoint['model'])}` (from {endpoint['model_from']})"
    return f"{name} at {endpoint['url']}{f', {printable(told)}' if told else ''}: {requests_words(body)}"


def _figures_table(timing: Mapping[str, Any]) -> RenderableType:
    table = Grid("", "median (95 %)", "p95", "p99")
    for figure, name in FIGURE_NAMES.items():
        if figure not in timing:
            continue
        found = timing[figure]
        ends = found["ci95"]
        interval = f" ({milliseconds(ends[0])}–{milliseconds(ends[1])})" if ends else ""
        row = [milliseconds(found[key]) for key in ("median", "p95", "p99")]
        table.add_row(name, row[0] + interval, *row[1:])
    return table


def _parts_table(name: str, parts: Mapping[str, Any]) -> RenderableType:
    """Tasks or turns, a row each."""
    table = Grid(name, "prompts", "output tokens", "first text ms", "per token ms", "answer ms")
    for part, found in parts.items():
        timing, tokens = found["timing"], found["output_tokens"]
        cells = [milliseconds(timing[figure]["median"]) for figure in ("ttft_s", "tpot_s", "latency_s")]
        shown = NOTHING if tokens is None else str(tokens)
        table.add_row(Text(printable(part)), str(found["num_prompts"]), shown, *cells)
    return table
