"""k steps of an EAGLE-3 head on a CPU, beside what reading its weights costs at that time.

    python benchmarks/head_step.py
    python benchmarks/head_step.py --hidden 4096 --inner 14336 --heads 32 --name 8b --dtype bfloat16

The head has random weights in the shape of one for a published target (hidden size, MLP, heads, drafted tokens). One
sequence; each proposal brings the hidden states of `--new` tokens and drafts k more. Its floor is the bytes that it
reads (the joining matrix once, layer and output layer k times) over the bandwidth of reading a buffer of that size,
measured in turn. Medians and the best of all turns, with the load of the machine. Kept as results/head_step_NAME.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import record
import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec_cli.drafters.contract import DraftRow, Resources
from specdec_cli.drafters.eagle3 import Drafter
from specdec_cli.lm.door import Row
from specdec_cli.lm.load import DTYPES
from specdec_cli.lm.machine.threads import allot_threads
from specdec_cli.lm.table import LMWithoutWeights
from specdec_cli.sampling.params import SamplingParams

TAPS = 3


class HiddenStates(LMWithoutWeights):
    """Stands for a target: it has a dtype, a width and a vocabulary, and the head borrows nothing of it."""

    name, max_context, block_size = "hidden states", 4096, 16

    def __init__(self, vocab_size: int, hidden: int, dtype: torch.dtype) -> None:
        self.vocab_size, self.dtype, self._hidden = vocab_size, dtype, hidden
        self.num_blocks = self.num_free_blocks = 512

    def score(self, rows: Sequence[Row]) -> Tensor:
        """Nothing is scored."""
        raise NotImplementedError

    def release(self, handle: int) -> None:
        """Nothing is held."""

    def embed(self, tokens: Any) -> Tensor:
        """Of the right width."""
        return torch.zeros(len(tokens), self._hidden, dtype=self.dtype)


def publish(folder: Path, shape: argparse.Namespace) -> int:
    """Write a head; returns how many numbers a draft step reads, and those of the joining matrix beside them."""
    hidden, size = shape.hidden, shape.hidden // shape.heads
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": shape.inner, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": 1, "vocab_size": shape.vocab, "draft_vocab_size": shape.drafted, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 4096, "hidden_act": "silu",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 8, 13]},
    }  # fmt: skip
    shapes = {
        "midlayer.self_attn.q_proj.weight": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (shape.kv_heads * size, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (shape.kv_heads * size, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, hidden),
        "midlayer.mlp.gate_proj.weight": (shape.inner, hidden),
        "midlayer.mlp.up_proj.weight": (shape.inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, shape.inner),
        "lm_head.weight": (shape.drafted, hidden),
    }
    others = {"fc.weight": (hidden, TAPS * hidden), "embed_tokens.weight": (shape.vocab, hidden)}
    dtype = DTYPES[shape.dtype]
    weights = {name: (torch.randn(one) * one[-1] ** -0.5).to(dtype) for name, one in (shapes | others).items()}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    weights |= {f"{name}.weight": torch.ones(hidden, dtype=dtype) for name in norms}
    weights["d2t"] = torch.arange(shape.drafted) * (shape.vocab // shape.drafted - 1)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return sum(a * b for a, b in shapes.values())


def bytes_per_second(buffer: Tensor) -> float:
    """Bandwidth of reading a buffer once."""
    begin = perf_counter()
    buffer.sum()
    return buffer.nbytes / (perf_counter() - begin)


def proposal_seconds(drafter: Drafter, context: list[int], states: Tensor, k: int, temperature: float) -> float:
    """Seconds of one proposal of k tokens, with the states that it brings."""
    params = SamplingParams(temperature=temperature, seed=1)
    needs_q = temperature > 0
    row = DraftRow(0, context, 1, k, params, frozenset(), needs_q, False, 0.0, features=states)
    begin = perf_counter()
    guesses = drafter.propose([row])[0]
    seconds = perf_counter() - begin
    assert len(guesses.drafted) == k
    return seconds


def measure(drafter: Drafter, options: argparse.Namespace, num_numbers: int) -> dict[str, Any]:
    """Every k and temperature in turn, with the bandwidth before each."""
    dtype, hidden = DTYPES[options.dtype], options.hidden
    kinds = [(k, temperature) for k in options.k for temperature in (0.0, 1.0)]
    seconds: dict[tuple[int, float], list[float]] = {kind: [] for kind in kinds}
    floors: dict[tuple[int, float], list[float]] = {kind: [] for kind in kinds}
    buffer = torch.ones(num_numbers * dtype.itemsize // 4)
    states = torch.randn(options.context, TAPS, hidden).to(dtype)
    context = [3 + i % 1000 for i in range(options.context + 1)]
    proposal_seconds(drafter, context, states, 1, 0.0)
    for _ in range(options.turns):
        for kind in kinds:
            k, temperature = kind
            if len(context) > 3500:
                drafter.release(0)
                context = context[: options.context + 1]
                proposal_seconds(drafter, context, states, 1, 0.0)
            context = [*context, *range(5, 5 + options.new)]
            speed = bytes_per_second(buffer)
            seconds[kind].append(proposal_seconds(drafter, context, states[: options.new], k, temperature))
            num_bytes = (k * num_numbers + TAPS * hidden * hidden) * dtype.itemsize
            floors[kind].append(num_bytes / speed)
    return {
        f"k={k} T={temperature:g}": {
            "ms": median(seconds[k, temperature]) * 1e3,
            "best_ms": min(seconds[k, temperature]) * 1e3,
            "floor_ms": median(floors[k, temperature]) * 1e3,
            "best_floor_ms": min(floors[k, temperature]) * 1e3,
            "ratio": median(seconds[k, temperature]) / median(floors[k, temperature]),
            "best_ratio": min(seconds[k, temperature]) / min(floors[k, temperature]),
        }
        for k, temperature in kinds
    }


def main() -> None:
    """Measure and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="1b")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--drafted", type=int, default=32_000)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--new", type=int, default=3, help="states that each proposal brings")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    before = record.machine()
    allot_threads()
    with tempfile.TemporaryDirectory() as folder:
        num_numbers = publish(Path(folder), options)
        target = HiddenStates(options.vocab, options.hidden, DTYPES[options.dtype])
        drafter = Drafter(folder)
        drafter.load(Resources(lambda _: target, None, options.vocab, target))
    found = measure(drafter, options, num_numbers)
    for name, one in found.items():
        print(name, {key: round(value, 2) for key, value in one.items()})
    shape = vars(options) | {"numbers_per_step": num_numbers}
    print(record.save(f"head_step_{options.name}", before, {"shape": shape, "by_kind": found}))


if __name__ == "__main__":
    main()
