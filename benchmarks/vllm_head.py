"""A trained head in vLLM: exported, swept with `sweep-k --engine vllm`, and its acceptance beside our own engine's.

    python benchmarks/vllm_head.py HEAD --engine-command /opt/vllm/bin/vllm --engine-args='--enforce-eager' --k-max 4

HEAD is a folder of `train-draft --method eagle3` for the target. vLLM gets it as `train-draft --export speculators`
writes it. Greedy, in float32, the same prompts: acceptance predicted from our reading of vLLM's text, as vLLM counts
it, and as our own engine counts it on its own text. The intervals are over prompts. Times are not kept.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import record

from specdec_cli.document import as_json
from specdec_cli.engine.engine import Engine
from specdec_cli.measure.stats import ratio_of_totals
from specdec_cli.measure.workload.workload import read_rows
from specdec_cli.sampling.params import SamplingParams


def specdec(*words: str) -> str:
    """Standard output of a command."""
    return subprocess.run(
        [sys.executable, "-m", "specdec_cli", *words], stdout=subprocess.PIPE, check=True
    ).stdout.decode()


def own(given: argparse.Namespace, head: Path, k: int) -> dict[str, Any]:
    """Our own engine's acceptance at one k, each prompt alone."""
    engine = Engine.load(given.target, str(head), num_speculative_tokens=k, max_num_seqs=1, dtype="float32")
    rows = read_rows(given.dataset, None, given.num_prompts).rows[: given.num_prompts]
    params = SamplingParams(max_new_tokens=given.max_new_tokens, ignore_eos=True)
    counts = [one.speculative for one in engine.generate([str(row.prompt) for row in rows], params)]
    drafts, kept = (np.array([getattr(one, name) for one in counts]) for name in ("num_drafts", "num_accepted_tokens"))
    found = ratio_of_totals(drafts + kept, drafts)
    return {"drafts": int(drafts.sum()), "accepted": int(kept.sum()), "acceptance_length": as_json(found)}


def main() -> None:
    """Export, sweep, decode, and keep what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--target", default="builtin:target")
    parser.add_argument("--engine-command", default="vllm")
    parser.add_argument("--engine-args", default="")
    parser.add_argument("--k-max", type=int, default=4)
    parser.add_argument("--dataset", default="builtin:stories")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    given = parser.parse_args()
    before = record.machine()
    with tempfile.TemporaryDirectory() as folder:
        head = Path(folder) / "speculators"
        export = ["--export", "speculators", str(given.head), "-t", given.target, "--output", str(head)]
        specdec("train-draft", *export, "--quiet")
        words = ["sweep-k", "--engine", "vllm", "--engine-command", given.engine_command]
        words += [f"--engine-args={given.engine_args}", "-t", given.target, "-d", str(head), "--dtype", "float32"]
        words += ["--dataset", given.dataset, "--num-prompts", str(given.num_prompts), "--k-max", str(given.k_max)]
        words += ["-n", str(given.max_new_tokens), "--ignore-eos"]
        swept = json.loads(specdec(*words, "--json"))
        rows = []
        for row in swept["by_batch_size"][0]["rows"]:
            counted = row["measured"] and row["measured"]["acceptance_length"]
            one = {"k": row["k"], "predicted": row["predicted"]["acceptance_length"], "vllm": counted}
            rows.append(one | {"own": own(given, head, row["k"])})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    kept = {name: swept[name] for name in ("prompts", "tokens", "rule", "starts", "notices")}
    kept["version"] = swept["engine"]["version"]
    results = {"command": shlex.join(["python", "benchmarks/vllm_head.py", *sys.argv[1:]]), **kept, "rows": rows}
    print(record.save("vllm_head", before, results))


if __name__ == "__main__":
    main()
