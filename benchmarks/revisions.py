"""Two commits of this repository in turn: `bench` alone, and the demo beside busy neighbours.

    python benchmarks/revisions.py OLD NEW [--busy 0 4] [--starts 6]

Each run is a process of its own with the code of one commit (in a temporary worktree), in the order A B B A over the
starts. Alone it is `specdec bench`, eight prompts, each with and without the draft in turn; beside neighbours it is the
command of `make demo`, whose speed-up is kept for each process. Ratios are of tokens/s, new over old, start by start;
intervals are over starts. The commits share this environment's packages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import record
from threads import neighbours

from specdec_cli.measure.stats import bootstrap_median

ROOT = Path(__file__).parents[1]
PROMPT = "Once upon a time, there was a little rabbit who"
DEMO = ("generate", PROMPT, "--draft-quantize", "int8", "-k", "5", "-n", "160", "--compare", "--json")
FIGURES = {"tokens/s without draft": "plain", "tokens/s with draft": "draft", "speed-up": "speed-up"}
BENCH = ("bench", "-r", "builtin", "--num-prompts", "8", "--json")


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The commit's files in a folder that goes away."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def run(tree: Path, command: tuple[str, ...]) -> dict[str, Any]:
    """The JSON document that a commit's command prints."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = str(tree)
    whole = [sys.executable, "-m", "specdec_cli", *command]
    done = subprocess.run(whole, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def alone(trees: dict[str, Path], starts: int) -> dict[str, Any]:
    """Both commits' `bench` in turn."""
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for start in range(starts):
        for name in sorted(trees, reverse=start % 2 == 1):
            document = run(trees[name], BENCH)
            its = {arm: document[arm]["timing"]["decode_tokens_per_second"] for arm in ("plain", "draft")}
            rates[name].append({**its, "speed-up": document["speedup"]["decode"]["median"]})
    found: dict[str, Any] = {}
    for words, key in FIGURES.items():
        each = {name: [one[key] for one in its] for name, its in rates.items()}
        found |= {f"{words}, {name}": figure(values) for name, values in each.items()}
        ratios = [new / old for old, new in zip(each["old"], each["new"], strict=True)]
        found[f"{words}, new over old"] = figure(ratios)
    return found


def beside(trees: dict[str, Path], starts: int) -> dict[str, Any]:
    """Both commits' demo in turn beside the neighbours that run already."""
    speedups: dict[str, list[float]] = {name: [] for name in trees}
    for start in range(starts):
        for name in sorted(trees, reverse=start % 2 == 1):
            speedups[name].append(run(trees[name], DEMO)["compare"]["speedup"]["decode"]["median"])
    return {f"demo's speed-up, {name}": figure(its) for name, its in speedups.items()}


def figure(values: list[float]) -> dict[str, Any]:
    """A median over starts with its interval, and every value."""
    ends = bootstrap_median(np.array(values)).ci95
    each = [round(value, 3) for value in values]
    return {"median": round(median(values), 3), "ci95": ends and [round(end, 3) for end in ends], "starts": each}


def main() -> None:
    """Measure beside each number of neighbours and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--name", default="revisions", help="of the result's file")
    options = parser.parse_args()
    before = record.machine()
    results: dict[str, Any] = {"old": options.old, "new": options.new}
    with checkout(options.old) as old, checkout(options.new) as new:
        trees = {"old": old, "new": new}
        for number in options.busy:
            with neighbours(number, at_work=1.0):
                found = beside(trees, options.starts) if number else alone(trees, options.starts)
            results[f"{number} neighbours"] = found
            print(number, json.dumps(found), flush=True)
    print(record.save(options.name, before, results))


if __name__ == "__main__":
    main()
