"""The gain of a draft beside busy processes: threads as the engine chooses them, and one thread, in turn.

    python benchmarks/threads.py [--busy 0 1 2 4] [--starts 4] [--num-prompts 6] [--k 5] [--tokens 160] [--at-work 1.0]
    python benchmarks/threads.py --target FILE.gguf --draft suffix --prompts benchmarks/workloads/edit.jsonl --chat

The neighbours are processes of their own that compute without a pause (or for a share of each 20 ms, `--at-work`).
For each number of neighbours, each start runs two new processes with a pair, greedy (without `--target` the built-in
one, its draft int8): one chooses its threads, the other has OMP_NUM_THREADS=1. They decode one prompt after the other
in turn (A B B A), each prompt without and with the draft (A B B A). Figures are medians over all prompts; intervals
are over starts, whose processes differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import numpy as np
import record

import specdec_cli
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.measure.stats import bootstrap_pooled_median
from specdec_cli.sampling.params import SamplingParams

PROMPTS = Path(specdec_cli.__file__).parent / "measure" / "workload" / "prompts" / "stories.jsonl"
BUILT_IN = "builtin:target"
CHOSEN, ONE = "chosen", "one thread"
NEIGHBOUR = """
from time import perf_counter, sleep
while True:
    until = perf_counter() + 0.02 * {share}
    while perf_counter() < until: pass
    if {share} < 1: sleep(0.02 * (1 - {share}))
"""
Seconds = dict[str, float]


@contextmanager
def neighbours(number: int, at_work: float) -> Iterator[None]:
    """So many busy processes."""
    code = NEIGHBOUR.format(share=at_work)
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(number)]
    sleep(0.5)
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


class Decoding:
    """A process that decodes the prompts it is given with and without the draft.

    Args:
        environment: variables that are its own.
        words: the script's own, which choose the pair, k and the texts' length.
    """

    def __init__(self, environment: dict[str, str], words: Sequence[str]) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | environment
        command = [sys.executable, __file__, "--decode", *words]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.answer()

    def __enter__(self) -> Decoding:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def answer(self) -> Any:
        """Its next answer."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def decode(self, prompt: str) -> Seconds:
        """Seconds that decoding took without the draft and with it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompt) + "\n")
        self._process.stdin.flush()
        answer: Seconds = self.answer()
        return answer


def decode(options: argparse.Namespace) -> None:
    """Decode each prompt of standard input without and with the draft, A B B A."""
    settings = LoadSettings(draft=ModelSettings(quantize="int8")) if options.target == BUILT_IN else None
    engine = Engine.load(options.target, options.draft, settings=settings, num_speculative_tokens=options.k)
    params = SamplingParams(max_new_tokens=options.tokens)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        text, runs = json.loads(line), []
        prompt = [{"role": "user", "content": text}] if options.chat else text
        for k in (0, options.k, options.k, 0):
            engine.drafters.clear()
            runs.append(engine.generate([prompt], params, k)[0])
        plain, draft = (sum(runs[i].timing.decode_s or 0.0 for i in arm) for arm in ((0, 3), (1, 2)))
        print(json.dumps({"plain": plain, "draft": draft}), flush=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both ways of choosing threads beside one number of neighbours, which run already."""
    lines = options.prompts.read_text(encoding="utf-8").splitlines()[: options.num_prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]
    starts: dict[str, list[list[Seconds]]] = {CHOSEN: [], ONE: []}
    for start in range(options.starts):
        with ExitStack() as stack:
            running = {
                threads: stack.enter_context(Decoding(environment, sys.argv[1:]))
                for threads, environment in ((CHOSEN, {}), (ONE, {"OMP_NUM_THREADS": "1"}))
            }
            for its in starts.values():
                its.append([])
            for turn, prompt in enumerate(prompts):
                order = (CHOSEN, ONE) if (turn + start) % 2 == 0 else (ONE, CHOSEN)
                for threads in order:
                    starts[threads][-1].append(running[threads].decode(prompt))
    speedups = {name: [[one["plain"] / one["draft"] for one in its] for its in all_] for name, all_ in starts.items()}
    both = [[c / o for c, o in zip(*pair, strict=True)] for pair in zip(speedups[CHOSEN], speedups[ONE], strict=True)]
    faster = {
        arm: [
            [o[arm] / c[arm] for c, o in zip(*pair, strict=True)]
            for pair in zip(starts[CHOSEN], starts[ONE], strict=True)
        ]
        for arm in ("plain", "draft")
    }
    return {
        "speed-up, threads chosen": figure(speedups[CHOSEN]),
        "speed-up, one thread": figure(speedups[ONE]),
        "speed-up, chosen over one": figure(both),
        "tokens/s, chosen over one, without draft": figure(faster["plain"]),
        "tokens/s, chosen over one, with draft": figure(faster["draft"]),
    }


def figure(starts: list[list[float]]) -> dict[str, Any]:
    """A median over all prompts, and its interval over starts."""
    interval = bootstrap_pooled_median([np.array(its) for its in starts])
    ends = interval.ci95 if len(starts) > 1 else None
    return {"median": round(median(chain.from_iterable(starts)), 3), "ci95": ends and [round(end, 3) for end in ends]}


def main() -> None:
    """Measure beside each number of neighbours and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--target", default=BUILT_IN)
    parser.add_argument("--draft", default="builtin:draft")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--chat", action="store_true", help="apply the target's chat template")
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--at-work", type=float, default=1.0, help="share of the time that a neighbour computes")
    parser.add_argument("--name", default="threads", help="of the result's file")
    parser.add_argument("--decode", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.decode:
        decode(options)
        return
    before = record.machine()
    results = {}
    for number in options.busy:
        with neighbours(number, options.at_work):
            results[f"{number} neighbours"] = measure(options)
        print(number, json.dumps(results[f"{number} neighbours"]), flush=True)
    pair = {key: Path(getattr(options, key)).name for key in ("target", "draft", "prompts")} | {"k": options.k}
    print(record.save(options.name, before, {**pair, "at_work": options.at_work, **results}))


if __name__ == "__main__":
    main()
