"""Seconds of a forward with one and with two threads, built-in target and draft, by rows.

    python benchmarks/threads.py

The two thread counts are taken in turn (A B B A), medians over repeats.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

import record
import torch

from specdec_cli.lm.door import LM, Row
from specdec_cli.lm.load import load_lm

ROWS, REPEATS, FORWARDS = (1, 2, 3, 5, 9), 6, 20


def milliseconds(lm: LM, num_rows: int) -> float:
    """Median of FORWARDS forwards that re-score the last `num_rows` of 128 tokens."""
    times = []
    for i in range(FORWARDS):
        context = [*range(10, 138 - num_rows), *[200 + i] * num_rows]
        begin = perf_counter()
        lm.score([Row(0, context, num_rows)])
        times.append(perf_counter() - begin)
    lm.release(0)
    return median(times) * 1e3


def main() -> None:
    """Measure both models and keep the result."""
    before = record.machine()
    results = {}
    for name in ("builtin:target", "builtin:draft"):
        lm = load_lm(name)
        samples: dict[int, dict[int, list[float]]] = {n: {rows: [] for rows in ROWS} for n in (1, 2)}
        for repeat in range(REPEATS):
            for threads in (1, 2) if repeat % 2 == 0 else (2, 1):
                torch.set_num_threads(threads)
                for rows in ROWS:
                    samples[threads][rows].append(milliseconds(lm, rows))
        results[name] = {
            f"{threads} threads": {f"{rows} rows": round(median(times), 3) for rows, times in by_rows.items()}
            for threads, by_rows in samples.items()
        }
        print(name, results[name])
    print(record.save("threads", before, results))


if __name__ == "__main__":
    main()
