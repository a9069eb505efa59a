"""Tiny PARD-2 drafts as they are published, and their logits by transformers' model of the language model alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_heads import HIDDEN
from tiny_pard import MASK, MORE, publish_pard
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from specdec_cli.lm.door import Tap

PLACES, SCALE = [-1, -3, -5], 0.5
TAPS: tuple[Tap, ...] = ("final", 3, 1)  # of a target with six layers


def publish_pard2(folder: Path, family: str = "llama", seed: int = 5, wrap: bool = True, **keys: Any) -> Path:
    """Save a random PARD-2 draft; the projection is beside the weights, or among them."""
    keys = {
        "spd_type": "pard2", "pard2_target_layers": PLACES, "pard2_scale": SCALE, "pard2_proj_bias": False,
        "pard2_target_dim": len(PLACES) * HIDDEN, **keys,
    }  # fmt: skip
    publish_pard(folder, family, seed, **keys)
    weight = torch.randn(HIDDEN, len(PLACES) * HIDDEN, generator=torch.Generator().manual_seed(seed))
    save_projection(folder, weight / weight.shape[1] ** 0.5, wrap)
    return folder


def save_projection(folder: Path, weight: Tensor, wrap: bool = True) -> None:
    projection = {"target_proj.weight": weight}
    if wrap:
        torch.save(projection | {"base_model.model.norm.weight": torch.ones(3)}, folder / "warp_model.bin")
    else:
        save_file(load_file(folder / "model.safetensors") | projection, folder / "model.safetensors")


class Pard2Reference:
    """A draft's forward: each token comes with the projected states of the position before it, masks with the last."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        saved = torch.load(folder / "warp_model.bin") if (folder / "warp_model.bin").is_file() else {}
        saved = saved or load_file(folder / "model.safetensors")
        self.weight: Tensor = saved["target_proj.weight"]
        self.scale = json.loads((folder / "config.json").read_text())["pard2_scale"]

    def logits(self, context: Sequence[int], features: Tensor, k: int) -> Tensor:
        """Logits [k, MORE] behind a context of n tokens, by the states [n - 1, taps, hidden] before its last one."""
        ids, states = inputs_of(context, features, k)
        return self.run(ids[None], states[None])[0, -k:]

    def run(self, ids: Tensor, states: Tensor) -> Tensor:
        """Logits [n, length, MORE] of texts [n, length] with the states [n, length, taps · hidden] that they read."""
        inputs = self.model.get_input_embeddings()(ids) + self.scale * (states @ self.weight.T)
        found: Tensor = self.model(inputs_embeds=inputs).logits
        return found


def inputs_of(context: Sequence[int], features: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Tokens [n + k - 1] of a context and k - 1 masks, and the states that each reads."""
    states = torch.cat([torch.zeros_like(features[:1]), features[: len(context) - 1]]).flatten(1)
    return torch.tensor([*context, *[MASK] * (k - 1)]), torch.cat([states, states[-1:].expand(k - 1, -1)])


def train_pard2(folder: Path, text: Sequence[int], features: Tensor, first: int, k: int, steps: int = 40) -> None:
    """Fit a published draft's projection and language model to one text from a position on."""
    given = Pard2Reference(folder)
    given.weight.requires_grad_()
    optimizer = torch.optim.Adam([*given.model.parameters(), given.weight], lr=0.01)
    starts = range(first, len(text) - k)
    wanted = torch.tensor([text[start : start + k] for start in starts])
    ids, states = zip(*(inputs_of(text[:start], features, k) for start in starts), strict=True)
    together = pad_sequence(list(ids), batch_first=True), pad_sequence(list(states), batch_first=True)
    places = torch.tensor([[start - 1 + j for j in range(k)] for start in starts])[..., None].expand(-1, -1, MORE)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = given.run(*together).gather(1, places)
        functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()
        optimizer.step()
    config = (folder / "config.json").read_text()
    given.model.save_pretrained(folder)
    (folder / "config.json").write_text(config)
    save_projection(folder, given.weight.detach())
