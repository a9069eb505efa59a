"""A target's forward by rows in every precision, beside what reading its weights costs on this machine at that time.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --name embedded --target E/target --precision bfloat16 int8 --threads 2
    python benchmarks/roofline.py --name qwen_4096 --target FILE.gguf --precision file --context 4096 --rows 1 6

The targets stand side by side and take turns (A B B A); every turn times forwards of each number of rows on a context
of `--context` tokens, and reads as many bytes as the weights have, again and again. Kept are medians over turns, the
share of the floor (bytes over bandwidth) that a forward reaches, and ratios: rows against one row, and each precision
against the first. Kept as results/roofline_NAME.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import record
import torch

from specdec_cli.lm.door import Row
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.recipe.values import Quantize

# dtype, and how linear layers are quantized
PRECISIONS: dict[str, tuple[str, Quantize]] = {
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "int8": ("bfloat16", "int8"),
    "file": ("auto", "none"),
}


def forward_seconds(lm: TransformersLM, context: list[int], num_rows: int, repeats: int) -> float:
    """Median seconds of a forward of so many rows, one behind the other, on one sequence."""
    times = []
    lm.score([Row(0, context, 1)])
    for i in range(repeats):
        longer = [*context, *(7 + (i + j) % 50 for j in range(num_rows))]
        begin = perf_counter()
        lm.score([Row(0, longer, num_rows)])
        times.append(perf_counter() - begin)
    lm.release(0)
    return median(times)


def bytes_per_second(num_bytes: float, repeats: int) -> float:
    """Bandwidth of reading a buffer of this size. A small one stays in the caches, as small weights do."""
    buffer, times = torch.ones(int(num_bytes) // 4), []
    for _ in range(repeats):
        begin = perf_counter()
        buffer.sum()
        times.append(perf_counter() - begin)
    return num_bytes / median(times)


def main() -> None:
    """Measure every precision in turn and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="builtin")
    parser.add_argument("--target", default="builtin:target")
    parser.add_argument("--precision", nargs="+", choices=list(PRECISIONS), default=["float32", "bfloat16", "int8"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0, help="0 leaves the engine's own choice")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7, help="forwards in each turn")
    options = parser.parse_args()
    before = record.machine()
    room = options.context + max(options.rows) + 1
    targets = {}
    for name in options.precision:
        dtype, quantize = PRECISIONS[name]
        targets[name] = load_lm(
            options.target, max_num_seqs=1, max_model_len=max(512, room), dtype=dtype, quantize=quantize
        )
    if options.threads:
        torch.set_num_threads(options.threads)
    moved = {name: lm.traffic.bytes_moved(1, options.context) for name, lm in targets.items()}
    context = [5 + i % 97 for i in range(options.context)]
    seconds: dict[str, dict[int, list[float]]] = {name: {n: [] for n in options.rows} for name in targets}
    speeds: dict[str, list[float]] = {name: [] for name in targets}
    for turn in range(options.turns + 1):
        order = list(targets) if turn % 2 == 0 else list(targets)[::-1]
        for name in order:
            speeds[name].append(bytes_per_second(moved[name], options.repeats))
            for n in options.rows if turn % 4 < 2 else options.rows[::-1]:
                seconds[name][n].append(forward_seconds(targets[name], context, n, options.repeats))
    rows: dict[str, Any] = {}
    for name in targets:
        ms = {n: median(times[1:]) * 1e3 for n, times in seconds[name].items()}
        speed = median(speeds[name][1:])
        one, five = min(options.rows), 5 if 5 in ms else max(options.rows)
        first = seconds[options.precision[0]][one][1:]
        gains = [other / own for other, own in zip(first, seconds[name][one][1:], strict=True)]
        rises = [many / few for many, few in zip(seconds[name][five][1:], seconds[name][one][1:], strict=True)]
        rows[name] = {
            "megabytes": round(moved[name] / 1e6, 1),
            "read_gb_per_second": round(speed / 1e9, 2),
            "floor_ms": round(moved[name] / speed * 1e3, 3),
            "ms_by_rows": {n: round(value, 3) for n, value in ms.items()},
            "share_of_floor_at_1_row": round(moved[name] / speed * 1e3 / ms[one], 3),
            f"{five}_rows_over_1": round(median(rises), 3),
            f"faster_than_{options.precision[0]}_at_1_row": round(median(gains), 3),
        }
        print(name, json.dumps(rows[name]))
    found = {"target": Path(options.target).name, "context": options.context, "turns": options.turns, "rows": rows}
    print(record.save(f"roofline_{options.name}", before, found))


if __name__ == "__main__":
    main()
