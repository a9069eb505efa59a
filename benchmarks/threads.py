"""Milliseconds of a forward with one and two threads, built-in target and draft, by rows; beside busy processes too.

    python benchmarks/threads.py

The two thread counts are taken in turn (A B B A), a second each; means, for what busy processes do comes in long waits,
and medians. Two threads are what the decoder is given: beside others it leaves one of them out for a while.
"""

from __future__ import annotations

import subprocess
import sys
from statistics import fmean, median
from time import perf_counter, sleep

import record
import torch

from specdec_cli.lm.door import LM, Row
from specdec_cli.lm.load import load_lm

ROWS, REPEATS, SECONDS = (1, 5, 16, 48), 4, 1.0
BUSY = (0, 1, 2)


def forwards(lm: LM, num_rows: int) -> list[float]:
    """Milliseconds of forwards that re-score the last `num_rows` of 128 tokens, again and again."""
    times: list[float] = []
    until = perf_counter() + SECONDS
    while (begin := perf_counter()) < until:
        context = [*range(10, 138 - num_rows), *[200 + len(times) % 100] * num_rows]
        lm.score([Row(0, context, num_rows)])
        times.append((perf_counter() - begin) * 1e3)
    lm.release(0)
    return times[1:]  # the first one reads the whole context


def compare(lm: LM) -> dict[str, dict[str, float]]:
    """By rows: each thread count's mean and median, and what the second thread gains."""
    found = {}
    for num_rows in ROWS:
        times: dict[int, list[float]] = {1: [], 2: []}
        for repeat in range(REPEATS):
            for threads in (1, 2) if repeat % 2 == 0 else (2, 1):
                torch.set_num_threads(threads)
                times[threads] += forwards(lm, num_rows)
        found[f"{num_rows} rows"] = {
            "1 thread": round(fmean(times[1]), 3),
            "2 threads": round(fmean(times[2]), 3),
            "1 thread, median": round(median(times[1]), 3),
            "2 threads, median": round(median(times[2]), 3),
            "gain": round(fmean(times[1]) / fmean(times[2]), 2),
        }
    return found


def main() -> None:
    """Measure both models and keep the result."""
    before = record.machine()
    results = {}
    for name in ("builtin:target", "builtin:draft"):
        lm = load_lm(name)
        for num_busy in BUSY:
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy)]
            sleep(0.5)
            try:
                results[f"{name} beside {num_busy} busy processes"] = compare(lm)
            finally:
                for process in busy:
                    process.kill()
    for words, found in results.items():
        print(words, found)
    print(record.save("threads", before, results))


if __name__ == "__main__":
    main()
