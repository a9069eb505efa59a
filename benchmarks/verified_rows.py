"""Verification of five tokens beside one, in transformers' forward pass with packed and with plain layers.

    python benchmarks/verified_rows.py [--dtype float32] [--rounds 24] [--threads 1]

A random Granite 4 H (12 layers of 768: ten of Mamba-2, two of attention) reads one text twice, once with linear layers
packed as for every model and once with torch's plain ones. Each round feeds one token, then a guess of four behind one,
to both (A B B A over the rounds). Figures are medians of processor time, which busy neighbours change less than they
change elapsed time.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any
from unittest.mock import patch

import record
import torch
import transformers

from specdec_cli.lm.door import Row
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM

VOCAB, BEGIN, GUESS = 8192, 64, 4
TEXT = [(7919 * i * i + 31 * i) % VOCAB for i in range(400)]


def save_granite(folder: Path) -> str:
    """A random model of 103 M parameters."""
    torch.manual_seed(0)
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2048,
        shared_intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=0,
        num_experts_per_tok=0,
        layer_types=(["mamba"] * 5 + ["attention"]) * 2,
        mamba_n_heads=24,
        mamba_d_head=64,
        mamba_d_state=64,
        mamba_n_groups=1,
        position_embedding_type="nope",
        pad_token_id=0,
    )
    transformers.GraniteMoeHybridForCausalLM(config).save_pretrained(folder)
    return str(folder)


def load(folder: str, dtype: str, is_packed: bool) -> TransformersLM:
    """The model with packed layers, or with torch's own."""
    options: dict[str, Any] = {"dtype": dtype, "num_blocks": 64, "extra_tokens": 2 * GUESS, "check": False}
    if is_packed:
        return load_lm(folder, **options)
    with patch("specdec_cli.lm.kernels.kinds.can_pack", lambda _: False):
        return load_lm(folder, **options)


def seconds(lm: TransformersLM, length: int, num_logits: int) -> float:
    """Processor seconds of a forward that feeds the text's tokens up to `length`."""
    begin = process_time()
    lm.score([Row(0, TEXT[:length], num_logits)])
    return process_time() - begin


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Both models, in turn."""
    names = ("packed", "plain")
    models = {name: load(folder, options.dtype, name == "packed") for name in names}
    torch.set_num_threads(options.threads)
    times: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in names for rows in (1, 1 + GUESS)}
    for lm in models.values():
        lm.score([Row(0, TEXT[:BEGIN], 1)])
    for turn in range(options.rounds):
        length = BEGIN + turn * (2 + GUESS)
        for name in sorted(names, reverse=turn % 2 == 1):
            times[name, 1].append(seconds(models[name], length + 1, 1))
            times[name, 1 + GUESS].append(seconds(models[name], length + 2 + GUESS, 1 + GUESS))
    middle = {key: median(its) * 1e3 for key, its in times.items()}
    found = {f"{name}, {rows} rows, ms": round(its, 2) for (name, rows), its in middle.items()}
    ratios = {f"{name}, 5 rows over 1": round(middle[name, 1 + GUESS] / middle[name, 1], 3) for name in names}
    return found | ratios | {"1 row, packed over plain": round(middle["packed", 1] / middle["plain", 1], 3)}


def main() -> None:
    """Measure and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    before = record.machine()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, save_granite(Path(folder)))
    name = f"verified_rows_{options.dtype}_{options.threads}"
    print(record.save(name, before, {"dtype": options.dtype, **found}), found)


if __name__ == "__main__":
    main()
