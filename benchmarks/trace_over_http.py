"""Acceptance predicted through servers against what the engine then counts, for every k: specdec's server and vLLM.

    python benchmarks/trace_over_http.py --vllm /path/to/vllm --k 2,5 --num-prompts 32 --max-new-tokens 64

The trace comes from a server of the target (the engine's, without a draft) and one of the draft (specdec's). Then the
engine serves the pair with each k, gets the same prompts, and its own counters give the acceptance. The prediction is
that of the engine's own rule (`engine_rules`). At temperature 1 texts differ from run to run, so both figures have a
sampling error. vLLM's CPU build does not sample from the target there: it is compared with `vllm_cpu_fix`, and counted
as it is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record
from engine_served import vllm_serving
from served import serving

import specdec_cli

BUILT_IN = Path(specdec_cli.__file__).parent / "builtin"
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


def specdec(*words: str) -> dict[str, Any]:
    """The JSON document of a command."""
    run = subprocess.run(
        [sys.executable, "-m", "specdec_cli", *words, "--json", "--quiet"], stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def traced(target_url: str, draft_url: str, options: list[str]) -> dict[str, Any]:
    """Acceptance length by rule and k, and what the trace took."""
    found = specdec("sweep-k", "--target-endpoint", target_url, "--draft-endpoint", draft_url, *options)
    lengths: dict[str, dict[int, float]] = {}
    for row in found["rows"]:
        lengths.setdefault(row["rule"], {})[row["k"]] = row["acceptance_length"]["median"]
    took = {name: found["source"][name] for name in ("requests", "bytes", "seconds")}
    return {"acceptance_length": lengths, "prompts": found["prompts"], "tokens": found["tokens"], **took}


def counted(url: str, options: list[str]) -> float:
    """Acceptance length by the server's own counters over the same prompts."""
    found = specdec("bench", "--endpoint", url, "--concurrency", "8", *options)
    length: float = found["counters"]["speculative"]["acceptance_length"]
    return length


def compare(plain: Serve, ways: dict[str, Way], ks: list[int], options: list[str]) -> dict[str, Any]:
    """One engine: its traces, then every way to verify at every k."""
    traces = {}
    with plain(0) as target, serving("-t", str(BUILT_IN / "draft"), "-d", "none") as draft:
        for temperature in sorted({one for way in ways.values() for one in way.rules}):
            asked = [*options, "--temperature", temperature, "--k-max", str(max(ks))]
            traces[temperature] = traced(target, draft.url, asked)
            print(f"temperature {temperature}: {traces[temperature]}", file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = []
    for name, way in ways.items():
        for k in ks:
            with way.serve(k) as url:
                lengths = {one: counted(url, [*options, "--temperature", one]) for one in way.rules}
            for temperature, length in lengths.items():
                rule = way.rules[temperature]
                row: dict[str, Any] = {"way": name, "rule": rule, "temperature": temperature, "k": k, "counted": length}
                if rule is not None:
                    row["predicted"] = traces[temperature]["acceptance_length"][rule][k]
                    row["error"] = row["predicted"] / length - 1
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    errors = [abs(row["error"]) for row in rows if "error" in row]
    return {"traces": traces, "rows": rows, "largest_error": max(errors)}


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
        return vllm_serving(command, BUILT_IN / "target", speculative, log, is_repaired=is_repaired)

    return serve


def main() -> None:
    """Compare, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="vLLM's program; without it specdec's server alone is compared")
    parser.add_argument("--k", default="2,5")
    parser.add_argument("--num-prompts", default="32")
    parser.add_argument("--max-new-tokens", default="64")
    options = parser.parse_args()
    ks = [int(k) for k in options.k.split(",")]
    asked = ["--dataset", "builtin:stories", "--num-prompts", options.num_prompts]
    asked += ["--max-new-tokens", options.max_new_tokens, "--ignore-eos"]
    before = record.machine()
    ways = {"default": Way({"0": "greedy", "1": "block"}, own)}
    results = {"specdec": compare(own, ways, ks, asked)}
    if options.vllm is not None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            default = vllm(options.vllm, folder, is_repaired=True)
            sampled = vllm(options.vllm, folder, is_repaired=True, draft_sample_method="probabilistic")
            ways = {
                "default, repaired": Way({"0": "greedy", "1": "one-hot"}, default),
                "probabilistic, repaired": Way({"1": "rejection"}, sampled),
                "default, as it is": Way({"1": None}, vllm(options.vllm, folder)),
            }
            results["vllm"] = compare(vllm(options.vllm, folder), ways, ks, asked)
    print(record.save("trace_over_http", before, {"options": asked, "engines": results}))


if __name__ == "__main__":
    main()
