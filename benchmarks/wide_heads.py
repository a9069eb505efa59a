"""Write a Llama checkpoint with wider attention heads that computes the same: for engines that refuse narrow ones.

    python benchmarks/wide_heads.py stories260K OUT --head-dim 32

vLLM's attention on a CPU takes heads of 32 or more dimensions. What is added is zero. Scores are divided by the square
root of a head's width, so queries grow by the square root of how much wider it is. A narrow head of n dimensions
rotates its pair j by theta^(-2j/n); in a head r times wider, pair r j turns at that rate, so it goes there. With r = 4
the factor is 2, and what differs is the order of sums.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def places(narrow: int, wide: int) -> Tensor:
    """Where each dimension [narrow] of a head goes in the wider one: pairs are half a head apart."""
    first = torch.arange(narrow // 2) * (wide // narrow)
    return torch.cat((first, first + wide // 2))


def wider(weight: Tensor, narrow: int, wide: int, at: Tensor) -> Tensor:
    """Rows [heads * narrow, width] of a projection as rows [heads * wide, width]."""
    heads, width = weight.shape[0] // narrow, weight.shape[1]
    made = weight.new_zeros(heads, wide, width)
    made[:, at] = weight.view(heads, narrow, width)
    return made.reshape(heads * wide, width)


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--head-dim", type=int, default=32)
    given = parser.parse_args()
    config = json.loads((given.source / "config.json").read_text())
    assert config["model_type"] == "llama", "written for Llama"
    narrow = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wide = given.head_dim
    at, scale = places(narrow, wide), (wide / narrow) ** 0.5
    weights = load_file(given.source / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weights[name] = wider(weight, narrow, wide, at) * (scale if "q_proj" in name else 1)
        elif name.endswith("o_proj.weight"):
            weights[name] = wider(weight.t().contiguous(), narrow, wide, at).t().contiguous()
    given.out.mkdir(parents=True, exist_ok=True)
    for path in given.source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, given.out / path.name)
    (given.out / "config.json").write_text(json.dumps(config | {"head_dim": wide}, indent=1) + "\n")
    save_file(weights, given.out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
