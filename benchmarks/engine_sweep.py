"""Predicted against measured speed-ups of an engine at every k, and the acceptance it counts, on the built-in pair.

    python benchmarks/engine_sweep.py --vllm /path/to/vllm --k-max 6 --num-prompts 24 --max-new-tokens 48

The engine, vLLM or else specdec's own server, is started without a draft and with every k, or the best few. Costs are
fitted to the starts at k = 0, 1 and the largest k alone; the others are compared with the prediction. At temperature 1
acceptance is counted in the same starts, with `vllm_cpu_fix`: as it is, vLLM's CPU build does not sample from the
target. Speed is that of temperature 0, one request at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import record
from served import serving
from trace_over_http import BUILT_IN, Serve, counted, own, traced, vllm

from specdec_cli.draft_shape import PLAIN, DraftShape
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.lm.load import load_lm
from specdec_cli.measure.elsewhere.engine_sweep import EngineSweep
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.measure.predict.tracing import trace_draft
from specdec_cli.measure.workload.workload import read_rows
from specdec_cli.recipe.schema import Sampling

DATASET = "builtin:stories"


class Starts:
    """An engine with k drafted tokens, and its acceptance at temperature 1 before each start ends."""

    def __init__(self, serve: Serve, rows: Sequence[PromptRow], sampling: Sampling, k_max: int) -> None:
        self.serve, self.rows, self.k_max = serve, rows, k_max
        self.sampling = sampling.model_copy(update={"temperature": 1.0})
        self.trace: Trace | None = None
        self.took: dict[str, Any] = {}
        self.counted: dict[int, float] = {}

    @contextmanager
    def start(self, shape: DraftShape) -> Iterator[str]:
        """A start, for `EngineSweep`."""
        k = shape.k
        with self.serve(k) as url:
            yield url
            if k:
                accepted, steps = counted(url, self.rows, self.sampling)
                self.counted[k] = float(1 + accepted.sum() / steps.sum())
            else:
                with serving("-t", str(BUILT_IN / "draft"), "-d", "none") as draft:
                    self.trace, self.took = asyncio.run(traced(url, draft.url, self.rows, self.sampling, self.k_max))
        print(f"k = {k} at load {os.getloadavg()[0]:.1f}: {self.counted.get(k)}", file=sys.stderr, flush=True)


def read(trace: Trace) -> str:
    """The built-in draft along the target's text."""
    from specdec_cli.drafters import create
    from specdec_cli.drafters.contract import Resources

    drafter = create("model", {"model": "draft"})
    lm = load_lm(str(BUILT_IN / "draft"), max_num_seqs=1)
    drafter.load(Resources(lambda _: lm, None, lm.vocab_size))
    trace.drafts["draft"] = trace_draft(trace, drafter, 1)
    return "draft"


def greedy(sweep: EngineSweep) -> dict[str, Any]:
    """Speed-ups and acceptance lengths at temperature 0."""
    found = sweep.by_size[0]
    rows = []
    for row in found.prediction.rows:
        run = found.runs.get(row.shape)
        if run is None:
            continue
        measured = run.speedup_over(found.runs[PLAIN])
        one: dict[str, Any] = {"k": row.k, "fitted": row.shape in found.fitted.fitted_on, "load": round(run.load, 2)}
        one["speedup"] = {"predicted": row.speedup.median, "measured": measured.median, "ci95": measured.ci95}
        one["step_seconds"] = {"predicted": found.fitted.step_seconds(row.k), "measured": run.step_seconds}
        one["acceptance_length"] = {"predicted": row.acceptance_length.median, "counted": run.counts.acceptance_length}
        one["error"] = row.speedup.median / measured.median - 1
        rows.append(one)
    best = max(rows, key=lambda one: one["speedup"]["measured"])
    predicted = max(rows, key=lambda one: one["speedup"]["predicted"])
    return {
        "plain_step_seconds": found.runs[PLAIN].step_seconds,
        "plain_load": round(found.runs[PLAIN].load, 2),
        "rows": rows,
        "median_error": float(np.median([abs(one["error"]) for one in rows])),
        "best_measured_k": best["k"],
        "best_predicted_k": predicted["k"],
        "predicted_best_over_measured_best": predicted["speedup"]["measured"] / best["speedup"]["measured"],
        "trace": {"requests": sweep.num_requests, "bytes": sweep.num_bytes},
    }


def sampled(starts: Starts, rule: str) -> dict[str, Any]:
    """Acceptance lengths at temperature 1 under the engine's default rule."""
    assert starts.trace is not None, "the first start traces"
    found = replay(starts.trace, "draft", rule, starts.k_max)
    lengths = {one.k: one.acceptance_length().median for one in found}
    rows = [
        {"k": k, "predicted": lengths[k], "counted": length, "error": lengths[k] / length - 1}
        for k, length in sorted(starts.counted.items())
    ]
    return {"rule": rule, "rows": rows, "trace": starts.took}


def main() -> None:
    """Sweep, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="vLLM's program; specdec's own server without it")
    parser.add_argument("--k-max", type=int, default=6)
    parser.add_argument("--num-measured", type=int, default=128, help="most k to measure beside the first and the last")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args()
    rows = read_rows(DATASET, None, options.num_prompts, False).rows[: options.num_prompts]
    asked = ["--dataset", DATASET, "--num-prompts", str(options.num_prompts)]
    asked += ["--max-new-tokens", str(options.max_new_tokens), "--ignore-eos"]
    sampling = Sampling(max_new_tokens=options.max_new_tokens, ignore_eos=True)
    before = record.machine()
    with tempfile.TemporaryDirectory() as folder:
        there = None if options.vllm is None else vllm(options.vllm, Path(folder), is_repaired=True)
        rule = "block" if there is None else "one-hot"
        starts = Starts(there or own, rows, sampling, options.k_max)
        sweep = EngineSweep(
            start=starts.start,
            rows=rows,
            sampling=sampling,
            k_max=options.k_max,
            num_measured=options.num_measured,
            rule="greedy",
            trace_draft=read,
            tell=lambda words: print(words, file=sys.stderr, flush=True),
        )
        sweep.run()
    name = "specdec" if options.vllm is None else "vllm"
    results = {"options": asked, "version": sweep.version, "greedy": greedy(sweep), "sampled": sampled(starts, rule)}
    print(record.save(f"engine_sweep_{name}", before, results))


if __name__ == "__main__":
    main()
