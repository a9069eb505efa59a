"""Two commits of this repository in turn: `bench` alone, and the demo beside busy neighbours.

    python benchmarks/revisions.py OLD NEW [--busy 0 4] [--starts 6] [--prompts 12] [--streams 4]

Each process runs the code of one commit (in a temporary worktree). Alone, each start runs one process of each commit,
which decode prompts in turn (A B B A), each prompt without and with the int8 draft (A B B A); ratios are of tokens/s,
new over old, prompt by prompt, and intervals are over starts. Beside neighbours each run is the command of `make demo`
in a process of its own, whose speed-up is kept. Served, both servers run with the built-in pair, and so many streams at
once of one and of the other in turn. The commits share this environment's packages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import numpy as np
import record
from served import Served, serving
from threads import PROMPTS, Decoding, neighbours
from threads import figure as pooled_figure

from specdec_cli.measure.stats import bootstrap_median

ROOT = Path(__file__).parents[1]
PROMPT = "Once upon a time, there was a little rabbit who"
DEMO = ("generate", PROMPT, "--draft-quantize", "int8", "-k", "5", "-n", "160", "--compare", "--json")
K, TOKENS = 5, 160
SERVED_TURNS = 12


def stories() -> list[str]:
    """Prompts in the style of the built-in pair."""
    return [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


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


def _short(commit: str) -> str:
    """A commit's short hash, whatever names it."""
    named = subprocess.run(
        ["git", "rev-parse", "--short", commit], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return named.stdout.strip()


def run(tree: Path, command: tuple[str, ...]) -> dict[str, Any]:
    """The JSON document that a commit's command prints."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = str(tree)
    whole = [sys.executable, "-m", "specdec_cli", *command]
    done = subprocess.run(whole, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def alone(trees: dict[str, Path], starts: int, num_prompts: int) -> dict[str, Any]:
    """Both commits decode each prompt in turn."""
    ratios: dict[str, list[list[float]]] = {"plain": [], "draft": []}
    words = ("--k", str(K), "--tokens", str(TOKENS))
    for start in range(starts):
        with ExitStack() as stack:
            running = {
                name: stack.enter_context(Decoding({"PYTHONPATH": str(tree)}, words)) for name, tree in trees.items()
            }
            for its in ratios.values():
                its.append([])
            for turn, prompt in enumerate(stories()[:num_prompts]):
                order = sorted(trees, reverse=(turn + start) % 2 == 1)
                seconds = {name: running[name].decode(prompt) for name in order}
                for arm, its in ratios.items():
                    its[-1].append(seconds["old"][arm] / seconds["new"][arm])
    return {f"tokens/s, new over old, {arm}": pooled_figure(its) for arm, its in ratios.items()}


def served(trees: dict[str, Path], starts: int, num_streams: int) -> dict[str, Any]:
    """Both commits serve streams in turn, the other one idle."""
    ratios: list[list[float]] = []
    for start in range(starts):
        with ExitStack() as stack:
            servers = {name: stack.enter_context(serving(tree=trees[name])) for name in sorted(trees)}
            pool = stack.enter_context(ThreadPoolExecutor(num_streams))

            def seconds(server: Served, prompts: list[str], pool: ThreadPoolExecutor = pool) -> float:
                begin = monotonic()
                list(pool.map(lambda prompt: _stream(server, prompt), prompts))
                return monotonic() - begin

            for server in servers.values():
                seconds(server, stories()[:num_streams])  # not counted
            ratios.append([])
            for turn in range(SERVED_TURNS):
                prompts = stories()[turn : turn + num_streams]
                order = sorted(servers, reverse=(turn + start) % 2 == 1)
                taken = {name: seconds(servers[name], prompts) for name in order}
                ratios[-1].append(taken["old"] / taken["new"])
    return {f"served tokens/s, new over old, {num_streams} streams": pooled_figure(ratios)}


def _stream(server: Served, prompt: str) -> None:
    """Read a streamed completion to its end."""
    fields = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(fields).encode(), headers)
    with urllib.request.urlopen(asked, timeout=120) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


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
    parser.add_argument("--prompts", type=int, default=12, help="of each start, alone")
    parser.add_argument("--streams", type=int, default=4, help="of each server at once; 0 serves none")
    parser.add_argument("--name", default="revisions", help="of the result's file")
    options = parser.parse_args()
    before = record.machine()
    results: dict[str, Any] = {"old": _short(options.old), "new": _short(options.new)}
    with checkout(options.old) as old, checkout(options.new) as new:
        trees = {"old": old, "new": new}
        for number in options.busy:
            with neighbours(number, at_work=1.0):
                found = beside(trees, options.starts) if number else alone(trees, options.starts, options.prompts)
            results[f"{number} neighbours"] = found
            print(number, json.dumps(found), flush=True)
        if options.streams:
            results["served"] = served(trees, options.starts, options.streams)
            print(json.dumps(results["served"]), flush=True)
    print(record.save(options.name, before, results))


if __name__ == "__main__":
    main()
