"""The report of `bench --endpoint`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.text import Text

from specdec_cli.measure.endpoint.endpoint_bench import num_tokens
from specdec_cli.report.columns import PageTable
from specdec_cli.report.endpoint import (
    LEGEND,
    acceptance_lines,
    endpoint_tables,
    groups_table,
    milliseconds,
    part_tables,
    requests_words,
    throughput_words,
)
from specdec_cli.report.grid import Grid
from specdec_cli.report.result import print_result
from specdec_cli.report.table import NOTHING
from specdec_cli.text.printable import printable

if TYPE_CHECKING:
    from specdec_cli.measure.endpoint.endpoint_bench import EndpointBench


def live_table(bench: EndpointBench) -> RenderableType:
    """The answers so far, without intervals."""
    table = Grid("answered", "failed", "output tokens", "first text ms", "per token ms", "answer ms")
    answers = [answer for _, answer in bench.answered()]
    figures = (
        [answer.ttft_s for answer in answers],
        [answer.tpot_s for answer in answers],
        [answer.end_s for answer in answers],
    )
    tokens = num_tokens(bench.answered())
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
    times, *_ = endpoint_tables(body)
    checks = acceptance_lines(body)
    groups = groups_table(body)
    figures: list[PageTable | str] = [_head(body), times.first, *([] if groups is None else [groups])]
    further: list[PageTable | str] = [LEGEND, *part_tables(body)]
    more = further if details else None
    print_result(console, body, [throughput_words(body)], figures, checks, more, "every task and turn")
    for message, num in Counter(error["message"] for error in body["errors"]).items():
        console.print(Text(f"failed, {num}×: {message}", style="red"), soft_wrap=True)


def _head(body: Mapping[str, Any]) -> str:
    endpoint = body["endpoint"]
    server = " ".join(word for word in (endpoint["server"], endpoint["version"]) if word)
    name = f"`{printable(endpoint['model'])}` (from {endpoint['model_from']})"
    return f"{name} at {endpoint['url']}{f', {printable(server)}' if server else ''}: {requests_words(body)}"
