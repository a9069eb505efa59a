"""Time of a step against context, and memory against batch size: both must be straight lines.

    python benchmarks/scale.py [--dtype bfloat16] [--rows 1 5]

A target with random weights (the embedded pair's shape with a longer context) takes a forward of each number of rows
behind contexts of 128 … 8,192 tokens, in turn; the slope is compared with what reading the cached keys and values costs
at the bandwidth measured beside it. Then so many sequences of `--tokens` tokens each: how much the process grew. Kept
as results/scale.json.
"""

from __future__ import annotations

import argparse
import tempfile
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import record
import torch
from transformers import LlamaConfig

from specdec_cli.lm.door import Row
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM

CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16)
CHUNK, CACHE_BYTES = 512, 3 * 2**30
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 8320,
}


def fill(lm: TransformersLM, handle: int, length: int) -> list[int]:
    """ForwardInput a sequence in chunks, as prompts are; its tokens."""
    tokens = [5 + (i * 7 + handle) % 97 for i in range(length)]
    for stop in range(CHUNK, length + CHUNK, CHUNK):
        lm.score([Row(handle, tokens[:stop], 0)])
    return tokens


def step_seconds(lm: TransformersLM, tokens: list[int], num_rows: int, repeats: int) -> float:
    """Median seconds of a forward of so many rows behind a context."""
    times = []
    for i in range(repeats):
        longer = tokens + [7 + (i + j) % 50 for j in range(num_rows)]
        begin = perf_counter()
        lm.score([Row(0, longer, num_rows)])
        times.append(perf_counter() - begin)
    return median(times)


def bytes_per_second() -> float:
    """Reading 256 MiB."""
    buffer, times = torch.ones(2**26), []
    for _ in range(5):
        begin = perf_counter()
        buffer.sum()
        times.append(perf_counter() - begin)
    return 2**28 / median(times)


def by_context(lm: TransformersLM, rows: list[int], turns: int) -> dict[str, Any]:
    """Milliseconds by rows and context, and their straight lines."""
    seconds: dict[int, dict[int, list[float]]] = {n: {length: [] for length in CONTEXTS} for n in rows}
    speeds = []
    for turn in range(turns + 1):
        for length in CONTEXTS if turn % 2 == 0 else CONTEXTS[::-1]:
            tokens = fill(lm, 0, length)
            for n in rows:
                seconds[n][length].append(step_seconds(lm, tokens, n, 5))
            lm.release(0)
        speeds.append(bytes_per_second())
    speed, found = median(speeds), {}
    for n in rows:
        ms = [median(seconds[n][length][1:]) * 1e3 for length in CONTEXTS]
        slope, start = np.polyfit(CONTEXTS, ms, 1)
        straight = start + slope * np.array(CONTEXTS)
        found[f"{n} rows"] = {
            "ms": dict(zip(CONTEXTS, (round(value, 3) for value in ms), strict=True)),
            "slope_us_per_1000_tokens": round(1e6 * slope, 1),
            "read_us_per_1000_tokens": round(1e9 * lm.kv_bytes_per_token / speed, 1),
            "worst_distance_from_the_line": round(float(np.abs(np.array(ms) / straight - 1).max()), 3),
        }
    return {"read_gb_per_second": round(speed / 1e9, 2), "kv_bytes_per_token": lm.kv_bytes_per_token, **found}


def by_batch(lm: TransformersLM, num_tokens: int) -> list[dict[str, float]]:
    """Resident memory as sequences are added, each with its prompt and one step of all together."""
    process, rows = psutil.Process(), []
    sequences: dict[int, list[int]] = {}
    before = process.memory_info().rss
    for batch in BATCHES:
        for handle in range(len(sequences), batch):
            sequences[handle] = fill(lm, handle, num_tokens)
        lm.score([Row(handle, [*tokens, 9], 1) for handle, tokens in sequences.items()])
        grown = process.memory_info().rss - before
        expected = batch * num_tokens * lm.kv_bytes_per_token
        rows.append({"batch": batch, "grown_mb": round(grown / 1e6, 1), "keys_and_values_mb": round(expected / 1e6, 1)})
    for handle in sequences:
        lm.release(handle)
    return rows


def main() -> None:
    """Measure both and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--tokens", type=int, default=1024, help="of each sequence while memory is measured")
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    before = record.machine()
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(architectures=["LlamaForCausalLM"], **SHAPE).save_pretrained(folder)
        lm = load_lm(
            folder, load_format="dummy", dtype=options.dtype, max_num_seqs=max(BATCHES), kv_cache_bytes=CACHE_BYTES
        )
    memory = by_batch(lm, options.tokens)
    print(memory)
    found = {**vars(options), "memory": memory, "context": by_context(lm, options.rows, options.turns)}
    print(found["context"])
    print(record.save("scale", before, found))


if __name__ == "__main__":
    main()
