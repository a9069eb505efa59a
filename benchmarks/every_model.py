"""Decode a tiny checkpoint of every causal model type of the installed transformers, each way, beside transformers.

    python benchmarks/every_model.py                      # all types and wrappers: about ten minutes
    python benchmarks/every_model.py llama deepseek_v3    # some types; prints, keeps nothing

Each type is a target without a draft, with a random draft, itself, a noisy copy of itself and n-grams: ragged batches,
windows exceeded, prompts in chunks, cached prefixes. float32 text is compared with `generate(do_sample=False)`, logits
with those of whole texts; in bfloat16 speculative text with plain text. Workers are processes: one that dies or takes
too long loses one type. `scripts/docs_models.py` writes docs/models.md from the result.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from typing import Any

from record import RESULTS, machine, save

RESULT = RESULTS / "every_model.json"
TESTS = Path(__file__).parents[1] / "tests"
SECONDS_PER_TYPE = SECONDS_TO_START = 180


def work(model_types: list[str], has_bfloat16: bool) -> None:
    """Check types one after the other; a line of JSON for each."""
    sys.path[:0] = [str(TESTS)]
    import torch

    every_type, model_check = (importlib.import_module(name) for name in ("every_type", "model_check"))
    torch.set_num_threads(1)
    for model_type in model_types:
        print(json.dumps({"begins": model_type}), flush=True)
        with tempfile.TemporaryDirectory() as room:
            folder = Path(room) / model_type
            try:
                found = model_check.check(every_type.save_tiny(model_type, folder), has_bfloat16)
                if found.plain == "refused" and not model_check.has_weights(folder):
                    found.has_checkpoint = False
            except Exception as error:
                found = model_check.Outcome(reason=f"{type(error).__name__}: {error}"[:600])
            said = found.reason.replace(str(folder), model_type)
            found.reason = said.replace(f"architecture `{model_type}` of `{model_type}`", f"`{model_type}`")
        print(json.dumps({"type": model_type, **found.as_dict()}), flush=True)


def run(model_types: list[str], has_bfloat16: bool) -> dict[str, Any]:
    """Outcomes by type, from workers that are started again where one ends early."""
    found: dict[str, Any] = {}
    while left := [one for one in model_types if one not in found]:
        command = [sys.executable, __file__, "--worker", *([] if has_bfloat16 else ["--no-bfloat16"]), *left]
        ways: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **ways) as worker:
            lost = follow(worker, found)
        if lost is not None:
            found[lost] = {"plain": "crash", "reason": f"its process ended with {worker.returncode}"}
            print(f"{lost:28} {one_line(found[lost])}", flush=True)
    return found


def follow(worker: subprocess.Popen[str], found: dict[str, Any]) -> str | None:
    """Collect a worker's outcomes until it ends; the type in which it died, if any."""
    assert worker.stdout is not None, "a worker writes to a pipe"
    current, watch = None, Timer(SECONDS_TO_START, worker.kill)
    watch.start()
    for line in worker.stdout:
        if not line.startswith("{"):
            continue
        document = json.loads(line)
        watch.cancel()
        watch = Timer(SECONDS_PER_TYPE, worker.kill)
        watch.start()
        current = document.get("begins", current)
        if "type" in document:
            model_type = document.pop("type")
            found[model_type] = document
            print(f"{model_type:28} {one_line(document)}", flush=True)
    watch.cancel()
    worker.wait()
    assert current is not None, "a worker does not start"
    return None if current in found else current


def one_line(outcome: dict[str, Any]) -> str:
    """An outcome for the terminal."""
    words = [outcome["plain"], outcome.get("draft", ""), outcome.get("bfloat16", ""), outcome.get("reason", "")]
    return " | ".join(word for word in words if word)


def main() -> None:
    """Check all types, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; none means all of them, kept in results/")
    parser.add_argument("--no-bfloat16", action="store_true", help="float32 alone")
    parser.add_argument("--jobs", type=int, default=1, help="workers at a time")
    parser.add_argument("--update", action="store_true", help="replace the outcomes of these types in results/")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.types, not arguments.no_bfloat16)
        return
    sys.path[:0] = [str(TESTS)]
    every_type = importlib.import_module("every_type")
    causal, wrappers = every_type.TYPES, every_type.WRAPPERS
    before = machine()
    types = arguments.types or [*causal, *wrappers]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        futures = [
            pool.submit(run, types[i :: arguments.jobs], not arguments.no_bfloat16) for i in range(arguments.jobs)
        ]
        found = {name: outcome for future in futures for name, outcome in future.result().items()}
    for name, types in (("causal types", causal), ("multimodal wrappers", wrappers)):
        counts = Counter(found[one]["plain"] for one in types if one in found)
        print(f"{name}: " + ", ".join(f"{num} {verdict}" for verdict, num in counts.most_common()))
    if not arguments.types or arguments.update:
        known = json.loads(RESULT.read_text(encoding="utf-8"))["results"] if arguments.update else {}
        every = {**known.get("causal", {}), **known.get("wrappers", {}), **found}
        parts = {"causal": causal, "wrappers": wrappers}
        results = {part: {one: every[one] for one in types if one in every} for part, types in parts.items()}
        print(save("every_model", before, results))


if __name__ == "__main__":
    main()
