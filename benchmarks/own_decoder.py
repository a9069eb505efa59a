"""Our own decoder beside transformers' forward pass, for each family that it runs: plain decoding of one sequence.

    python benchmarks/own_decoder.py [--dtype bfloat16 --size tiny|medium --rounds 6 --family NAME ...]

Random checkpoints of one shape per size. Both decoders read the same text in turn (A B B A), on one thread; a round's
figure is the median processor time of its tokens, which busy neighbours change less than they change elapsed time. The
ratio is transformers' time over ours, the median over rounds with a bootstrap 95 % interval. In float32 the logits must
agree to rounding; in bfloat16 a rounding sends rows of a random mixture to other experts, so nothing is compared.
Sizes, dtypes and families are added to results/own_decoder.json, where each replaces its earlier entry and has the load
of its time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import record
import torch

from specdec_cli.lm.door import Row
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.oracle import relative_error
from specdec_cli.measure.stats import bootstrap_median

sys.path.append(str(Path(__file__).parents[1] / "tests"))
make_tiny = importlib.import_module("tiny_models").make_tiny

NAME, PROMPT, TOKENS = "own_decoder", 96, 24
MOST_ERROR = 0.01
"""In float32. A random gpt-oss of 12 layers amplifies roundings: transformers' float32 is 0.001 from its float64."""
FAMILIES = ("llama", "mistral", "phi3", "smollm3", "olmo2", "olmo3", "gemma", "gemma2", "gemma3_text", "granite")
MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
SHAPE = {"vocab_size": 8192, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": SHAPE | {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4},
    "medium": SHAPE
    | {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
}
EXPERTS = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 4}


def shape_of(family: str, size: str) -> dict[str, Any]:
    """A checkpoint's sizes: heads of 64 numbers, windows of 64 keys on alternate layers where a family has some."""
    shape = SIZES[size] | {"head_dim": 64}
    if family in ("olmo3", "gemma2", "gemma3_text"):
        shape["layer_types"] = ["sliding_attention", "full_attention"] * (shape["num_hidden_layers"] // 2)
    if family in ("mistral", "olmo3", "gemma2", "gemma3_text", "gpt_oss"):
        shape["sliding_window"] = 64
    if family in MIXTURES:
        shape |= EXPERTS | {"intermediate_size": shape["intermediate_size"] // 4}
        shape["moe_intermediate_size"] = shape["intermediate_size"]
    if family.startswith("gemma"):
        shape["query_pre_attn_scalar"] = 64
    return shape


def time_tokens(lm: Any, text: list[int]) -> tuple[float, torch.Tensor]:
    """Median processor seconds of a token behind a prompt, and the logits."""
    lm.score([Row(0, text[:PROMPT], 0)])
    seconds, logits = [], []
    for length in range(PROMPT + 1, len(text) + 1):
        begin = process_time()
        logits.append(lm.score([Row(0, text[:length], 1)]))
        seconds.append(process_time() - begin)
    lm.release(0)
    return median(seconds), torch.cat(logits)


def compare(family: str, size: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Both decoders on one checkpoint."""
    text = [(7919 * i * i + 31 * i) % 8192 for i in range(PROMPT + TOKENS)]
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(family, folder, vectors=0.1, **shape_of(family, size))
        lms = {name: load_lm(folder, dtype=dtype, decoder=name, check=False) for name in ("auto", "transformers")}
        assert lms["auto"].decoder == "own", lms["auto"].decoder_obstacle
        found: dict[str, list[float]] = {name: [] for name in lms}
        logits = [time_tokens(lm, text)[1] for lm in lms.values()]
        error = relative_error(*logits)
        assert dtype != "float32" or error < MOST_ERROR, f"logits differ: relative error {error:.1e}"
        for repeat in range(rounds):
            for name in lms if repeat % 2 == 0 else reversed(lms):
                found[name].append(time_tokens(lms[name], text)[0])
    ratios = np.array(found["transformers"]) / np.array(found["auto"])
    return {
        "own_ms": round(1e3 * median(found["auto"]), 3),
        "transformers_ms": round(1e3 * median(found["transformers"]), 3),
        "ratio": round(float(np.median(ratios)), 2),
        "ci95": [round(end, 2) for end in bootstrap_median(ratios).ci95 or ()],
        "parameters": lms["auto"].num_parameters,
    }


def main() -> None:
    """Measure the families that were asked for and add them to what is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, nargs="+", default=[*SIZES])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--family", nargs="+", default=[*FAMILIES, *MIXTURES])
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = record.RESULTS / f"{NAME}.json"
    results = json.loads(path.read_text(encoding="utf-8"))["results"] if path.is_file() else {}
    before = record.machine()
    for size in options.size:
        for dtype in options.dtype:
            for family in options.family:
                found = compare(family, size, dtype, options.rounds)
                results[f"{family} {size} {dtype}"] = found | {"load_average_1m": record.machine()["load_average_1m"]}
                print(family, size, dtype, found, flush=True)
                record.save(NAME, before, dict(sorted(results.items())))


if __name__ == "__main__":
    main()
