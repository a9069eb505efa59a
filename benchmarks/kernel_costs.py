"""Milliseconds of one matrix product by rows: torch's own, packed bfloat16, int8, each matrix read from memory.

    python benchmarks/kernel_costs.py

Matrices of the 356 M and the 15 M embedded pair, and one of a 7 B model. As many of each stand in rotation as do not
fit the caches. The kernels take turns (A B B A); medians over repeats, and the fastest, which a busy machine disturbs
less. Beside them: what reading the same bytes costs. A kernel that this machine does not have is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import record
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_cli.lm.kernels.kinds import Kind, kernels, missing, pack

SHAPES = {"2048x1024": (2048, 1024), "7168x1024": (7168, 1024), "1024x3584": (1024, 3584), "4096x4096": (4096, 4096)}
ROWS, REPEATS, ROTATION_BYTES = (1, 2, 3, 4, 5, 6, 8, 12, 16), 8, 96 * 2**20


def products(shape: tuple[int, int], count: int) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """`count` products of each kernel, with weights of their own."""
    generator = torch.Generator().manual_seed(0)
    weights = [(torch.randn(shape, generator=generator) * shape[1] ** -0.5).bfloat16() for _ in range(count)]
    plain: dict[str, list[Callable[[Tensor], Tensor]]] = {
        "F.linear": [partial(F.linear, weight=weight) for weight in weights]
    }
    fast: dict[str, Kind] = {"bf16": "packed"} if missing("bfloat16") is None else {}
    fast |= {"int8": "int8"} if missing("int8") is None else {}
    return plain | {name: [pack(weight, None, kind) for weight in weights] for name, kind in fast.items()}


def milliseconds(rotation: list[Callable[[Tensor], Tensor]], rows: Tensor) -> float:
    """One turn through the rotation, per product."""
    begin = perf_counter()
    for product in rotation:
        product(rows)
    return (perf_counter() - begin) / len(rotation) * 1e3


def reading(num_bytes: int) -> float:
    """Milliseconds that reading so many bytes takes, from a buffer that no cache holds."""
    buffer = torch.ones(ROTATION_BYTES // 4)
    times = []
    for _ in range(2 * REPEATS):
        begin = perf_counter()
        buffer.sum()
        times.append(perf_counter() - begin)
    return min(times) * 1e3 * num_bytes / ROTATION_BYTES


def main() -> None:
    """Measure every shape and keep the result."""
    before, results = record.machine(), {}
    for name, shape in SHAPES.items():
        num_bytes = 2 * shape[0] * shape[1]
        rotations = products(shape, max(2, -(-ROTATION_BYTES // num_bytes)))
        inputs = {n: torch.randn(n, shape[1], generator=torch.Generator().manual_seed(n)).bfloat16() for n in ROWS}
        samples: dict[str, dict[int, list[float]]] = {kernel: {n: [] for n in ROWS} for kernel in rotations}
        floors = []
        with torch.inference_mode():
            for repeat in range(REPEATS + 1):
                order = list(rotations)
                for kernel in order if repeat % 2 == 0 else reversed(order):
                    for n in ROWS:
                        samples[kernel][n].append(milliseconds(rotations[kernel], inputs[n]))
                floors.append(reading(num_bytes))
        results[name] = {
            kernel: {
                "median": {n: round(median(times[1:]), 4) for n, times in by_rows.items()},
                "fastest": {n: round(min(times[1:]), 4) for n, times in by_rows.items()},
            }
            for kernel, by_rows in samples.items()
        } | {"reading bf16": round(min(floors), 4), "reading int8": round(min(floors) / 2, 4)}
        for kernel, found in results[name].items():
            print(name, kernel, *(found["fastest"].values() if isinstance(found, dict) else [found]))
    print(record.save("kernel_costs", before, {"kernels": kernels(), "repeats": REPEATS, "milliseconds": results}))


if __name__ == "__main__":
    main()
