"""Acceptance predicted through servers against what the engine then counts, for every k: specdec's server and vLLM.

    python benchmarks/trace_over_http.py --vllm /path/to/vllm --k 1,2,4,6 --num-prompts 24 --max-new-tokens 96

The trace comes from a server of the target (the engine's, without a draft) and one of the draft (specdec's). Then the
engine serves the pair with each k, gets the same prompts, and its own counters give the acceptance. The prediction is
that of the engine's own rule (`engine_rules`). At temperature 1 texts differ from run to run, so both figures have a
sampling error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import record
from engine_served import vllm_serving
from served import serving

import specdec_cli

BUILT_IN = Path(specdec_cli.__file__).parent / "builtin"
Serve = Callable[[int], Any]


def specdec(*words: str) -> dict[str, Any]:
    """The JSON document of a command."""
    run = subprocess.run(
        [sys.executable, "-m", "specdec_cli", *words, "--json", "--quiet"], stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def predicted(target_url: str, draft_url: str, rule: str, options: list[str]) -> dict[str, Any]:
    """Acceptance length by k under a rule, and what the trace took."""
    found = specdec("sweep-k", "--target-endpoint", target_url, "--draft-endpoint", draft_url, *options)
    rows = {row["k"]: row["acceptance_length"]["median"] for row in found["rows"] if row["rule"] == rule}
    if rule == "uniform":  # a vocabulary's share of each drafted token
        share = 1 / json.loads((BUILT_IN / "target" / "config.json").read_text())["vocab_size"]
        rows = {k: sum(share**i for i in range(k + 1)) for k in range(1, found["k_max"] + 1)}
    source = {name: found["source"][name] for name in ("requests", "bytes", "seconds")}
    return {"by_k": rows, "prompts": found["prompts"], "tokens": found["tokens"], **source}


def counted(url: str, options: list[str]) -> float:
    """Acceptance length by the server's own counters over the same prompts."""
    found = specdec("bench", "--endpoint", url, "--concurrency", "4", *options)
    length: float = found["counters"]["speculative"]["acceptance_length"]
    return length


def compare(serve: Serve, rules: dict[str, str], ks: list[int], options: list[str]) -> dict[str, Any]:
    """One engine: its trace at both temperatures, then every k."""
    found: dict[str, Any] = {}
    with serve(0) as target, serving("-t", str(BUILT_IN / "draft"), "-d", "none") as draft:
        for temperature, rule in rules.items():
            took = predicted(target, draft.url, rule, [*options, "--temperature", temperature, "--k-max", str(max(ks))])
            found[temperature] = {"rule": rule, "trace": took, "rows": []}
            print(f"temperature {temperature}: {took}", file=sys.stderr)
    for k in ks:
        with serve(k) as url:
            for temperature, one in found.items():
                length = counted(url, [*options, "--temperature", temperature])
                expected = one["trace"]["by_k"][k]
                row = {"k": k, "predicted": expected, "counted": length, "error": expected / length - 1}
                one["rows"].append(row)
                print(f"temperature {temperature}: {row}", file=sys.stderr)
    return found


@contextmanager
def own(k: int) -> Iterator[str]:
    """specdec's server; 0 serves without a draft."""
    draft = ("-d", str(BUILT_IN / "draft"), "-k", str(k)) if k else ("-d", "none")
    with serving("-t", str(BUILT_IN / "target"), *draft) as one:
        yield one.url


def vllm(command: str, folder: Path) -> Serve:
    """vLLM's server; 0 serves without a draft."""

    def serve(k: int) -> Any:
        speculative = {"method": "draft_model", "model": str(BUILT_IN / "draft"), "num_speculative_tokens": k}
        return vllm_serving(command, BUILT_IN / "target", speculative if k else None, folder / "vllm.log")

    return serve


def main() -> None:
    """Compare, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="vLLM's program; without it specdec's server alone is compared")
    parser.add_argument("--vllm-rule", default="uniform", help="its rule above temperature 0; a CPU build's is uniform")
    parser.add_argument("--k", default="1,2,4,6")
    parser.add_argument("--num-prompts", default="24")
    parser.add_argument("--max-new-tokens", default="96")
    options = parser.parse_args()
    ks = [int(k) for k in options.k.split(",")]
    asked = ["--dataset", "builtin:stories", "--num-prompts", options.num_prompts]
    asked += ["--max-new-tokens", options.max_new_tokens, "--ignore-eos"]
    before = record.machine()
    results = {"specdec": compare(own, {"0": "greedy", "1": "block"}, ks, asked)}
    if options.vllm is not None:
        with tempfile.TemporaryDirectory() as folder:
            rules = {"0": "greedy", "1": options.vllm_rule}
            results["vllm"] = compare(vllm(options.vllm, Path(folder)), rules, ks, asked)
    print(record.save("trace_over_http", before, {"options": asked, "engines": results}))


if __name__ == "__main__":
    main()
