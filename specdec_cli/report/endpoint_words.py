"""A server's measurement in sentences, the same on a terminal, on a page and in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_cli.measure.endpoint.endpoint_plan import pace_words
from specdec_cli.report.table import NOTHING, number, percent, rank_words

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
    return f"{requests['answered']} of {requests['planned']} requests answered, {pace}"


def acceptance_words(found: Mapping[str, Any] | None) -> str | None:
    """Acceptance as the answers report it, or None."""
    if found is None:
        return None
    rate, length = found["rate"], found["length"]
    rate_ends = f" ({percent(rate['ci95'][0])}–{percent(rate['ci95'][1])})" if rate["ci95"] else ""
    length_ends = f" ({number(length['ci95'][0])}–{number(length['ci95'][1])})" if length["ci95"] else ""
    said = f"Acceptance by {found['requests']} answers' own counts: rate {percent(rate['median'])}{rate_ends}"
    return f"{said}, length {number(length['median'])}{length_ends}."


def milliseconds(seconds: float | None) -> str:
    """Milliseconds with as many digits as they are good for, or a dash."""
    return NOTHING if seconds is None else f"{1000 * seconds:.{2 if seconds < 0.1 else 0}f}"


def throughput_words(body: Mapping[str, Any]) -> str:
    """Tokens and requests per second, and what they rest on."""
    output, rates = body["output"], body["throughput"]
    requests = f"{number(rates['requests_per_second'])} requests/s"
    if output["tokens"] is None:
        return f"Throughput: {requests} over {rates['seconds']:.1f} s."
    return (
        f"Throughput: {number(rates['output_tokens_per_second'], 1)} output tokens/s, {requests}: {output['tokens']} "
        f"tokens (by {output['counted_by']}, in {output['chunks']} chunks) in {rates['seconds']:.1f} s."
    )


def counter_lines(counters: Mapping[str, Any] | None) -> list[str]:
    """The server's own counts, in words."""
    if counters is None:
        return []
    head, lines = f"{counters['engine']}'s {counters['source']}", []
    found = counters["speculative"]
    if found is not None:
        drafted = " ".join(
            f"{NOTHING if found[key] is None else found[key]} {word}"
            for key, word in (("num_draft_tokens", "tokens drafted,"), ("num_accepted_tokens", "accepted"))
        )
        steps = "" if found["num_drafts"] is None else f" in {found['num_drafts']} steps"
        rates = found["per_position_acceptance_rates"]
        by_position = f"; at position 1…k: {' '.join(map(percent, rates))}" if rates else ""
        if "num_draft_nodes" in found:
            by_position += f"; {found['num_draft_nodes']} nodes of trees"
            by_position += f", accepted by rank 1, 2, …: {rank_words(found['acceptance_by_rank'])}"
        lines.append(
            f"Speculation by {head}: {drafted}{steps}: rate {percent(found['acceptance_rate'])}, "
            f"length {number(found['acceptance_length'])}{by_position}."
        )
    if counters["gauges"]:
        shown = ", ".join(
            f"{name} {NOTHING if value is None else format(value, 'g')}" for name, value in counters["gauges"].items()
        )
        lines.append(f"Gauges of {head}, of its last moments: {shown}.")
    return lines
