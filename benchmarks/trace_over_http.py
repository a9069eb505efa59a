"""Acceptance predicted through servers against what the engine then counts, for every k: specdec's server and vLLM.

    python benchmarks/trace_over_http.py --vllm /path/to/vllm --num-prompts 36 --max-new-tokens 192 --passes 8

The trace comes from a server of the target (the engine's, without a draft) and one of the draft (specdec's). Then the
engine serves the pair with each k, gets the same prompts, and counts. The prediction is that of the engine's own rule
(`engine_rules`). vLLM's CPU build does not sample from the target at temperature 1: it is compared with `vllm_cpu_fix`,
and counted once as it is.

At temperature 1 both sides are random texts, so each prompt is traced and counted `--passes` times with other seeds.
Intervals are of 95 %, by bootstrap over prompts; that of the error draws the same prompts on both sides. The file is
written after every pass, and a further start with the same sizes goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import record
from engine_served import vllm_serving
from served import serving

import specdec_cli
from specdec_cli.document import as_json
from specdec_cli.engine.driver import never
from specdec_cli.measure.endpoint.address import parse_address
from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm
from specdec_cli.measure.endpoint.endpoint_bench import EndpointBench
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan
from specdec_cli.measure.endpoint.server_counts import ACCEPTED, DRAFTS
from specdec_cli.measure.predict.engine_rules import DRAFTS_PAST_END
from specdec_cli.measure.predict.remote_trace import RemoteTracer
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.stats import FloatArray, bootstrap_totals, ratio_of_totals
from specdec_cli.measure.workload.workload import read_rows
from specdec_cli.recipe.schema import Sampling

BUILT_IN = Path(specdec_cli.__file__).parent / "builtin"
AT_A_TIME = 18
COUNTING = 500
"""Added to the seed of what is counted, so that its texts are others than those that are traced."""
Serve = Callable[[int], AbstractContextManager[str]]


@dataclass(frozen=True)
class Way:
    """One way of an engine to verify.

    Args:
        rules: by temperature, the rule as a trace replays it; None where none does, and acceptance is counted alone.
        serve: the pair with k drafted tokens.
    """

    rules: Mapping[str, str | None]
    serve: Serve


class Comparison:
    """One engine: its traces, then every way to verify at every k.

    Args:
        kept: what the file has of this engine; it is extended.
        save: writes the file.
        given: the command line's options.
    """

    def __init__(self, kept: dict[str, Any], save: Callable[[], None], given: argparse.Namespace) -> None:
        self.kept, self._save, self._given = kept, save, given
        self.rows = read_rows("builtin:stories", None, given.num_prompts).rows
        self.ks = [int(k) for k in given.k.split(",")]

    def run(self, plain: Serve, ways: Mapping[str, Way]) -> None:
        """Do what is missing."""
        rules: dict[str, set[str]] = {}
        for way in ways.values():
            for temperature, rule in way.rules.items():
                rules.setdefault(temperature, set()).update(() if rule is None else (rule,))
        traces = self.kept.setdefault("traces", {})
        if any(traces.get(one, {}).get("passes", 0) < self._passes(one) for one in rules):
            with plain(0) as target, serving("-t", str(BUILT_IN / "draft"), "-d", "none") as draft:
                for temperature, wanted in sorted(rules.items()):
                    self._trace(traces.setdefault(temperature, {"passes": 0}), temperature, wanted, target, draft.url)
        for name, way in ways.items():
            for k in self.ks:
                self._count(name, way, k)

    def _passes(self, temperature: str, rule: str | None = "") -> int:
        """One where chance has no part, or where nothing is compared."""
        return 1 if temperature == "0" or rule is None else int(self._given.passes)

    def _sampling(self, temperature: str, seed: int) -> Sampling:
        most = self._given.max_new_tokens
        return Sampling(temperature=float(temperature), max_new_tokens=most, ignore_eos=True, seed=seed)

    def _trace(self, kept: dict[str, Any], temperature: str, rules: set[str], target: str, draft: str) -> None:
        while kept["passes"] < self._passes(temperature):
            sampling = self._sampling(temperature, 1000 * kept["passes"])
            begin = perf_counter()
            found, took = asyncio.run(traced(target, draft, self.rows, sampling, max(self.ks)))
            took["seconds"] = perf_counter() - begin
            for name, value in took.items():
                kept[name] = kept.get(name, 0) + value
            for rule in sorted(rules):
                by_k = kept.setdefault("rules", {}).setdefault(rule, {})
                for one in replay(found, "draft", rule, max(self.ks)):
                    if one.k in self.ks:
                        add(by_k.setdefault(str(one.k), {}), one.num_accepted_tokens, one.num_drafts)
            kept["passes"] += 1
            self._save()

    def _count(self, name: str, way: Way, k: int) -> None:
        """One start of the engine: every temperature."""
        cells = self.kept.setdefault("rows", [])
        known = {cell["temperature"]: cell for cell in cells if (cell["way"], cell["k"]) == (name, k)}
        if all(known.get(one, {}).get("passes", 0) >= self._passes(one, rule) for one, rule in way.rules.items()):
            return
        with way.serve(k) as url:
            for temperature, rule in way.rules.items():
                if temperature not in known:
                    known[temperature] = {"way": name, "rule": rule, "temperature": temperature, "k": k, "passes": 0}
                    cells.append(known[temperature])
                cell = known[temperature]
                while cell["passes"] < self._passes(temperature, rule):
                    sampling = self._sampling(temperature, 1000 * cell["passes"] + COUNTING)
                    add(cell.setdefault("by_prompt", {}), *counted(url, self.rows, sampling))
                    cell["passes"] += 1
                    self._judge(cell)
                    self._save()
                    print({one: cell[one] for one in cell if one != "by_prompt"}, file=sys.stderr, flush=True)

    def _judge(self, cell: dict[str, Any]) -> None:
        """Predicted beside counted, each with its interval, and the error of the prediction with its own."""
        accepted, steps = (np.array(cell["by_prompt"][one], dtype=np.float64) for one in ("accepted", "steps"))
        cell["counted"] = as_json(ratio_of_totals(accepted + steps, steps))
        if cell["rule"] is None:
            return
        found = self.kept["traces"][cell["temperature"]]["rules"][cell["rule"]][str(cell["k"])]
        predicted = [np.array(found[one], dtype=np.float64) for one in ("accepted", "steps")]
        cell["predicted"] = as_json(ratio_of_totals(predicted[0] + predicted[1], predicted[1]))
        cell["error"] = as_json(bootstrap_totals(error, np.stack((*predicted, accepted, steps), axis=1)))


def error(totals: FloatArray) -> FloatArray:
    """Predicted over counted acceptance length, less 1, from totals [R, 4]: accepted and steps of either side."""
    return np.asarray((1 + totals[:, 0] / totals[:, 1]) / (1 + totals[:, 2] / totals[:, 3]) - 1)


def add(kept: dict[str, list[float]], accepted: FloatArray, steps: FloatArray) -> None:
    """Add a pass to what each prompt accepted and in how many steps."""
    for name, values in (("accepted", accepted), ("steps", steps)):
        before = kept.get(name, [0.0] * len(values))
        kept[name] = [round(one + float(other), 3) for one, other in zip(before, values, strict=True)]


async def traced(target_url: str, draft_url: str, rows: Any, sampling: Sampling, k_max: int) -> tuple[Any, Any]:
    """A trace through both servers, and its requests, bytes and tokens."""
    async with (
        Endpoint(parse_address(target_url), None, 300.0, AT_A_TIME) as target,
        Endpoint(parse_address(draft_url), None, 300.0, AT_A_TIME) as draft,
    ):
        model, name = await target.choose_model(""), await draft.choose_model("")
        beyond = k_max if target.owner in DRAFTS_PAST_END else 0
        tracer = RemoteTracer(target, model, rows, sampling, False, AT_A_TIME, beyond)
        trace = await tracer.trace_target(lambda _done, _total: None)
        trace.drafts["draft"] = await tracer.trace_draft(trace, draft, name, lambda _done, _total: None)
        took = {
            "requests": target.num_requests + draft.num_requests,
            "bytes": target.num_bytes + draft.num_bytes,
            "tokens": trace.num_emitted_tokens,
        }
        return trace, took


def counted(url: str, rows: Any, sampling: Sampling) -> tuple[FloatArray, FloatArray]:
    """Accepted tokens and drafting steps of each prompt, by the answers; their sums are those of `/metrics`."""
    bench = EndpointBench(EndpointArm(EndpointPlan(parse_address(url), concurrency=AT_A_TIME), sampling), rows)
    bench.run(never, lambda: None)
    accepted, steps = np.zeros(len(rows)), np.zeros(len(rows))
    for at, row in enumerate(rows):
        own = [answer.speculation for visit, answer in bench.answered() if visit.row.index == row.index]
        assert len(own) == 1, f"prompt {row.index} has one answer"
        assert own[0] is not None, f"the answer to prompt {row.index} has its own counts"
        accepted[at], steps[at] = own[0].counts[ACCEPTED], own[0].counts.get(DRAFTS, 0)
    added = bench.counters.added
    sums = [round(added[name]) for name in (ACCEPTED, DRAFTS)]
    assert sums == [accepted.sum(), steps.sum()], f"/metrics counts {sums}, the answers {accepted.sum(), steps.sum()}"
    return accepted, steps


@contextmanager
def own(k: int) -> Iterator[str]:
    """specdec's server; 0 serves without a draft."""
    draft = ("-d", str(BUILT_IN / "draft"), "-k", str(k)) if k else ("-d", "none")
    with serving("-t", str(BUILT_IN / "target"), *draft) as one:
        yield one.url


def vllm(command: str, folder: Path, *, is_repaired: bool = False, **more: str) -> Serve:
    """vLLM's server; 0 serves without a draft."""
    config = {"method": "draft_model", "model": str(BUILT_IN / "draft"), **more}

    def serve(k: int) -> AbstractContextManager[str]:
        speculative = config | {"num_speculative_tokens": k} if k else None
        log = folder / "vllm.log"
        return vllm_serving(
            command, BUILT_IN / "target", speculative, log, max_num_seqs=AT_A_TIME, is_repaired=is_repaired
        )

    return serve


def main() -> None:
    """Compare, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="*", default=["specdec", "vllm"])
    parser.add_argument("--vllm", help="vLLM's program; without it specdec's server alone is compared")
    parser.add_argument("--k", default="1,2,4,6")
    parser.add_argument("--num-prompts", type=int, default=36)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--passes", type=int, default=8, help="at temperature 1, each with other seeds")
    parser.add_argument("--ways", nargs="*", help="of vLLM, those to count in this start; all without it")
    given = parser.parse_args()
    before, path = record.machine(), record.RESULTS / "trace_over_http.json"
    asked = {"num_prompts": given.num_prompts, "max_new_tokens": given.max_new_tokens, "k": given.k}
    results: dict[str, Any] = {"options": asked, "starts": [], "engines": {}}
    if path.exists() and json.loads(path.read_text())["results"]["options"] == asked:
        results = json.loads(path.read_text())["results"]
    results["starts"].append(record.brief(before))

    def save() -> None:
        for engine in results["engines"].values():
            errors = [abs(row["error"]["median"]) for row in engine.get("rows", []) if "error" in row]
            engine["largest_error"] = max(errors, default=None)
        print(record.save("trace_over_http", before, results), file=sys.stderr)

    def comparison(engine: str) -> Comparison:
        return Comparison(results["engines"].setdefault(engine, {}), save, given)

    if "specdec" in given.engines:
        comparison("specdec").run(own, {"default": Way({"0": "greedy", "1": "block"}, own)})
    if given.vllm is None or "vllm" not in given.engines:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        default = vllm(given.vllm, folder, is_repaired=True)
        sampled = vllm(given.vllm, folder, is_repaired=True, draft_sample_method="probabilistic")
        ways = {
            "default, repaired": Way({"0": "greedy", "1": "one-hot"}, default),
            "probabilistic, repaired": Way({"1": "rejection"}, sampled),
            "default, as it is": Way({"1": None}, vllm(given.vllm, folder)),
        }
        comparison("vllm").run(vllm(given.vllm, folder), {one: ways[one] for one in given.ways or ways})


if __name__ == "__main__":
    main()
