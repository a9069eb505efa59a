"""Tiny Medusa heads as they are published, and their forward in plain torch, written from the formulas alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_heads import HIDDEN
from tiny_models import VOCAB
from torch import Tensor
from torch.nn import functional

NUM_HEADS = 4


def medusa_logits(weights: dict[str, Tensor], states: Tensor, num_layers: int = 1) -> Tensor:
    """Logits [n, heads, V] of the authors' names: head i of the state at t predicts the token at t + 2 + i."""
    found = []
    for i in range(1 + max(int(name.split(".")[0]) for name in weights)):
        hidden = states
        for j in range(num_layers):
            added = hidden @ weights[f"{i}.{j}.linear.weight"].T + weights[f"{i}.{j}.linear.bias"]
            hidden = hidden + functional.silu(added)
        found.append(hidden @ weights[f"{i}.{num_layers}.weight"].T)
    return torch.stack(found, 1)


def random_medusa_weights(num_heads: int = NUM_HEADS, num_layers: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Random weights of heads by the authors' names."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(num_heads):
        for j in range(num_layers):
            shapes |= {f"{i}.{j}.linear.weight": (HIDDEN, HIDDEN), f"{i}.{j}.linear.bias": (HIDDEN,)}
        shapes[f"{i}.{num_layers}.weight"] = (VOCAB, HIDDEN)
    return {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}


def converted(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights by the names of folders that were converted for vLLM."""
    found = {}
    for name, one in weights.items():
        i, j, *rest = name.split(".")
        found[f"blocks.{i}.layers.{j}.{rest[-1]}" if rest[0] == "linear" else f"lm_heads.{i}.weight"] = one
    return found


def publish_medusa(folder: Path, weights: dict[str, Tensor], form: str = "pt", **keys: Any) -> Path:
    """Save heads as they are published.

    Args:
        folder: to make.
        weights: by the authors' names; of the form vllm by converted ones.
        form: pt or safetensors (the authors'), or vllm.
        keys: further keys of the configuration.
    """
    folder.mkdir(parents=True)
    if form == "vllm":
        config = {
            "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB,
            "num_heads": 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks.")),
            "num_hidden_layers": 1, "max_paths": 64, "topk": 10, "truncated_vocab_size": VOCAB, "medusa_fc_bias": True,
            "original_lm_head": False,
        }  # fmt: skip
    else:
        config = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1}
        config["transformers_version"] = "4.31.0"
    (folder / "config.json").write_text(json.dumps(config | keys))
    given = {name: one.detach().clone().contiguous() for name, one in weights.items()}
    if form == "pt":
        torch.save(given, folder / "medusa_lm_head.pt")
    else:
        save_file(given, folder / ("model.safetensors" if form == "vllm" else "medusa_lm_head.safetensors"))
    return folder
