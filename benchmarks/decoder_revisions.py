"""Our own decoder as an earlier commit had it beside today's, in one process and in turn: a forward by its rows.

    python benchmarks/decoder_revisions.py OLD MODEL.gguf ... [--rows 1 6 16 32 128 512] [--turns 12] [--save NAME]

Each model is loaded once for each of the two, which compute by their own C++ alone; OLD must take
today's structures. A turn times one forward of each (A B B A): up to 8 rows behind a context of 64 tokens, or a prompt
of so many. Kept are medians in milliseconds, and the median over turns of the time of OLD over today's with a 95 %
interval.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import record
from revisions import ROOT, checkout

from specdec_cli.lm.door import Row
from specdec_cli.lm.llama import native
from specdec_cli.lm.load import load_lm
from specdec_cli.measure.stats import bootstrap_median

CONTEXT, FEW = 64, 8


def loaded(model: str, root: Path) -> Any:
    """A model that computes by the C++ of a checkout."""
    native._built.cache_clear()
    native._FOLDER = root / "specdec_cli" / "lm" / "llama"
    return load_lm(model, check=False)


def seconds(lm: Any, rows: int, seed: int) -> float:
    """Of a forward of so many rows."""
    before = CONTEXT if rows <= FEW else 0
    text = [(7919 * i * i + 31 * i + seed) % lm.vocab_size for i in range(before + rows)]
    if before:
        lm.score([Row(0, text[:before], 0)])
    begin = perf_counter()
    lm.score([Row(0, text, rows if before else 1)])
    took = perf_counter() - begin
    lm.release(0)
    return took


def main() -> None:
    """Measure the models one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="the earlier commit")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 6, 16, 32, 128, 512])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--save", help="name of the result; printed alone without it")
    given = parser.parse_args()
    before, results = record.machine(), dict[str, Any](old=given.old)
    with checkout(given.old) as old:
        for model in given.models:
            lms = [loaded(model, root) for root in (old, ROOT)]
            found = results[Path(model).name] = {}
            for rows in given.rows:
                turns = []
                for turn in range(given.turns):
                    order = (0, 1, 1, 0)
                    times = [seconds(lms[which], rows, turn) for which in order]
                    turns.append([times[0] + times[3], times[1] + times[2]])
                old_ms, new_ms = np.median(turns, axis=0) * 500
                ratio = bootstrap_median(np.array([one / other for one, other in turns]))
                found[str(rows)] = {
                    "old, ms": round(float(old_ms), 2),
                    "ms": round(float(new_ms), 2),
                    "times as fast": [round(number, 3) for number in (ratio.median, *(ratio.ci95 or ()))],
                }
                print(Path(model).name, rows, json.dumps(found[str(rows)]), flush=True)
    if given.save:
        record.save(given.save, before, results)


if __name__ == "__main__":
    main()
