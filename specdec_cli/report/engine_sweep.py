"""The document of a sweep on another engine, `specdec.engine-sweep/1`, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.text import Text

from specdec_cli.report.acceptance import print_source
from specdec_cli.report.grid import Grid
from specdec_cli.report.recommendation import recommendation_words, size_name
from specdec_cli.report.table import number, percent

if TYPE_CHECKING:
    from specdec_cli.measure.elsewhere.engine_sweep import EngineSize, EngineSweep

SCHEMA = "specdec.engine-sweep/1"
_NO_END = 2**20  # sequences, the end of the last range of vLLM's table
_BUSY = 0.5  # runnable processes per core


def engine_sweep_body(
    sweep: EngineSweep, engine: str, command: str, config: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    """The document's own keys.

    Args:
        sweep: that has run.
        engine: its name.
        command: how its server is started.
        config: its settings of speculation.
        seconds: that all took.
    """
    assert sweep.trace is not None, "a sweep that has run has a trace"
    sizes = [_size(found) for found in sweep.sizes.values()]
    source = {"requests": sweep.num_requests, "bytes": sweep.num_bytes, "seconds": seconds}
    return {
        "engine": {"name": engine, "version": sweep.version, "command": command, "speculative_config": dict(config)},
        "target": sweep.trace.target,
        "draft": sweep.draft,
        "prompts": len(sweep.trace.prompts),
        "tokens": sweep.trace.num_emitted_tokens,
        "k_max": sweep.plan.k_max,
        "rule": "greedy" if sweep.trace.is_greedy else sweep.plan.rule,
        "starts": sweep.starts,
        "source": source,
        "by_batch_size": sizes,
        "median_error": sweep.median_error(),
        "table": table(sweep.k_by_batch()),
        "notices": _notices(sweep),
    }


def table(k_by_batch: Mapping[int, int]) -> dict[str, Any] | None:
    """The recommended k by batch size as engines take it; None of one batch size.

    vLLM's ranges are `num_speculative_tokens_per_batch_size`, the last without an end; TensorRT-LLM's
    `draft_len_schedule` gives each upper bound its k; SGLang's adaptive file lists steps from each batch size on.
    """
    if len(k_by_batch) < 2:
        return None
    first = next(iter(k_by_batch.values()))
    pairs = list(({1: first} | dict(k_by_batch)).items())
    ends = [*(size - 1 for size, _ in pairs[1:]), _NO_END]
    return {
        "k_by_batch": {str(size): k for size, k in pairs},
        "vllm": {"num_speculative_tokens_per_batch_size": [[b, e, k] for (b, k), e in zip(pairs, ends, strict=True)]},
        "trtllm": {"draft_len_schedule": {str(e): k for (_, k), e in zip(pairs, ends[:-1], strict=False)}},
        "sglang": {str(size): {"candidate_steps": [k]} for size, k in pairs},
    }


def _size(found: EngineSize) -> dict[str, Any]:
    assert found.costs is not None, "fitted"
    assert found.prediction is not None, "predicted"
    plain, recommended = found.runs[0], found.recommended()
    rows = []
    for row in found.prediction.rows:
        run = found.runs.get(row.k)
        rows.append(
            {
                "k": row.k,
                "predicted": {
                    "acceptance_length": row.acceptance_length.as_dict(),
                    "step_seconds": found.costs.step_seconds(row.k),
                    "speedup": row.speedup.as_dict(),
                },
                "measured": None
                if run is None
                else {
                    "acceptance_length": run.acceptance_length,
                    "step_seconds": run.step_seconds,
                    "speedup": run.speedup_over(plain).as_dict(),
                    "load": run.load,
                    "fitted": row.k in found.fitted,
                },
            }
        )
    costs = found.costs
    return {
        "batch_size": found.batch_size,
        "costs": {
            "plain_seconds": costs.plain_seconds,
            "base_seconds": costs.base_seconds,
            "seconds_per_token": costs.seconds_per_token,
            "error": {str(run.k): costs.error(run) for run in found.runs.values() if run.k},
            "load": plain.load,
        },
        "rows": rows,
        "recommended": {
            "k": recommended.k,
            "tree": None,
            "speedup": None if recommended.speedup is None else recommended.speedup.as_dict(),
            "why": recommended.why,
            "verdict": recommended.verdict,
            "needs": list(recommended.needs),
        },
    }


def _notices(sweep: EngineSweep) -> list[str]:
    assert sweep.trace is not None, "traced"
    found = list(sweep.trace.notices)
    runs = [run for size in sweep.sizes.values() for run in size.runs.values()]
    every = [size.costs for size in sweep.sizes.values() if size.costs is not None]
    found += [costs.doubt for costs in every if costs.doubt is not None]
    costs = every[0]
    most = max(run.load for run in runs)
    if most > _BUSY * costs.costs.load.num_cores + 1:  # the engine itself keeps a core busy
        said = f"the machine was busy: load {most:.1f} on {costs.costs.load.num_cores} cores; step times are unreliable"
        found.append(said)
    return [*found, *([costs.costs.warning] if costs.costs.warning else [])]


def print_engine_sweep(console: Console, document: Mapping[str, Any], details: bool) -> None:
    """Print the recommendation, predicted and measured figures of every k, and with `details` the costs of steps."""
    by_size = document["by_batch_size"]
    several = len(by_size) > 1
    for found in by_size:
        line = recommendation_words(found["recommended"], size_name(found, several))
        console.print(Text(line, style="bold"), soft_wrap=True)
    for found in by_size:
        if several:
            console.print(Text(f"{found['batch_size']} at a time"), soft_wrap=True)
        console.print(_grid(found["rows"]))
        if details:
            console.print(Text(_cost_words(found["costs"])), soft_wrap=True)
    if details:
        engine = document["engine"]
        head = f"{document['draft']} for {document['target']} on {engine['name']} {engine['version'] or ''}".rstrip()
        console.print(Text(f"{head}, under its rule {document['rule']}"), soft_wrap=True)
        print_source(console, document["source"])
    said = f"Predicted speed-ups differ from measured ones by {percent(document['median_error'])} in the median."
    console.print(Text(said), soft_wrap=True)
    if document["table"] is not None:
        ranges = document["table"]["vllm"]["num_speculative_tokens_per_batch_size"]
        console.print(Text(f"num_speculative_tokens_per_batch_size: {ranges}"), soft_wrap=True)
    for notice in document["notices"]:
        console.print(Text(f"note: {notice}", style="yellow"), soft_wrap=True)
    if not details:
        console.print(Text("--details adds the costs of steps and the engine's rule", style="dim"), soft_wrap=True)


def _cost_words(costs: Mapping[str, Any]) -> str:
    plain, base, slope = (1e3 * costs[name] for name in ("plain_seconds", "base_seconds", "seconds_per_token"))
    errors = [abs(error) for error in costs["error"].values()]
    around = f", fitted within {percent(float(np.max(errors)))}" if errors else ""
    return f"A step takes {plain:.1f} ms, with k drafted tokens {base:.1f} + {slope:.1f} k ms more{around}."


def _grid(rows: list[dict[str, Any]]) -> Grid:
    grid = Grid("k", "tokens per step", "predicted speed-up", "measured speed-up", "measured tokens per step")
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        grid.add_row(
            str(row["k"]),
            number(predicted["acceptance_length"]["median"]),
            number(predicted["speedup"]["median"]),
            "" if measured is None else number(measured["speedup"]["median"]),
            "" if measured is None else number(measured["acceptance_length"]),
        )
    return grid
