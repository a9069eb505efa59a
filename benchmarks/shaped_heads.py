"""Draft heads with random weights in the shape of those for a published target, as folders.

Each is written as it is published, and says how many numbers a proposal of k tokens has to read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec_cli.drafters import create
from specdec_cli.drafters.contract import Drafter
from specdec_cli.lm.door import Row
from specdec_cli.lm.heads.compiled_stack import CompiledProduct
from specdec_cli.measure.audit.table import LMWithoutWeights

TAPS, BLOCK_SIZE = 3, 16
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Target:
    """The shape of a target.

    Args:
        hidden: width of its states.
        inner: of its MLP.
        heads: of its attention.
        kv_heads: key heads.
        vocab: tokens.
        drafted: tokens that EAGLE-3 heads draft.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    drafted: int

    @property
    def size(self) -> int:
        """Numbers in each attention head."""
        return self.hidden // self.heads

    def layer(self, index: int, width: int) -> Shapes:
        """The matrices of a layer whose attention reads so many numbers."""
        keys, hidden = self.kv_heads * self.size, self.hidden
        attention = {"q": (hidden, width), "k": (keys, width), "v": (keys, width), "o": (hidden, hidden)}
        mlp = {"gate": (self.inner, hidden), "up": (self.inner, hidden), "down": (hidden, self.inner)}
        found: Shapes = {f"layers.{index}.self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
        return found | {f"layers.{index}.mlp.{name}_proj.weight": shape for name, shape in mlp.items()}

    def config(self, num_layers: int) -> dict[str, Any]:
        """Keys of a configuration of such layers."""
        return {
            "hidden_size": self.hidden, "intermediate_size": self.inner, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.size, "num_hidden_layers": num_layers,
            "vocab_size": self.vocab, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 4096,
            "hidden_act": "silu", "tie_word_embeddings": False,
        }  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A head's folder.

    Args:
        options: of its drafter.
        num_taps: states that it reads of each position.
        numbers: that a proposal of k tokens reads, by k.
    """

    options: dict[str, Any]
    num_taps: int
    numbers: Callable[[int], int]


def eagle3(folder: Path, target: Target, layers: Sequence[int] = (2, 9, 14)) -> Published:
    """One layer that reads twice the target's width, and an output layer over the drafted tokens.

    Args:
        folder: is made.
        target: its shape.
        layers: of the target, whose outputs it reads.
    """
    keys = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": list(layers)}
    return _eagle(folder, target, 1, keys)


def p_eagle(folder: Path, target: Target) -> Published:
    """Four layers, that all k tokens take together."""
    return _eagle(folder, target, 4, {"speculators_model_type": "peagle", "mask_token_id": 5})


def _eagle(folder: Path, target: Target, num_layers: int, keys: dict[str, Any]) -> Published:
    hidden, is_masked = target.hidden, num_layers > 1
    layers = target.layer(0, 2 * hidden)
    for i in range(1, num_layers):
        layers |= target.layer(i, hidden)
    head = {"lm_head.weight": (target.drafted, hidden)}
    others: Shapes = {"fc.weight": (hidden, TAPS * hidden), "embed_tokens.weight": (target.vocab, hidden)}
    others |= {"mask_hidden": (1, 1, TAPS * hidden)} if is_masked else {}
    norms = ["norm", "layers.0.hidden_norm", *_norms(num_layers)]
    ids = {"d2t": torch.arange(target.drafted) * (target.vocab // target.drafted - 1)}
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_version": "0.9.0", "draft_vocab_size": target.drafted,
        "transformer_layer_config": {**target.config(num_layers), "model_type": "llama"},
        "eagle_aux_hidden_state_layer_ids": [2, 9, 14], "target_hidden_size": hidden, **keys,
    }  # fmt: skip
    _save(folder, config, layers | head | others, dict.fromkeys(norms, hidden), ids)
    fixed, each = _sum(others["fc.weight"]), _sum(*layers.values(), *head.values())
    options = {"method": "p-eagle" if is_masked else "eagle3", "model": str(folder)}
    return Published(options, TAPS, lambda k: fixed + (each if is_masked else k * each))


def dflash(folder: Path, target: Target, read_layers: Sequence[int] = (1, 8, 13), num_layers: int = 5) -> Published:
    """Layers that a block of 16 rows takes together, and the target's output layer.

    Args:
        folder: is made.
        target: its shape.
        read_layers: of the target, whose outputs it reads.
        num_layers: of its own.
    """
    hidden = target.hidden
    layers: Shapes = {}
    for i in range(num_layers):
        layers |= target.layer(i, hidden)
    fc = {"fc.weight": (hidden, TAPS * hidden)}
    norms = dict.fromkeys(("norm", "hidden_norm", *_norms(num_layers)), hidden)
    norms |= {f"layers.{i}.self_attn.{name}_norm": target.size for i in range(num_layers) for name in "qk"}
    config = {
        **target.config(num_layers), "model_type": "qwen3", "architectures": ["DFlashDraftModel"],
        "num_target_layers": 16, "block_size": BLOCK_SIZE,
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": list(read_layers)},
    }  # fmt: skip
    _save(folder, config, layers | fc, norms)
    keys = _sum(*(shape for name, shape in layers.items() if ".k_proj" in name or ".v_proj" in name))
    rows = _sum(*layers.values(), (target.vocab, hidden))
    return Published({"method": "dflash", "model": str(folder)}, TAPS, lambda k: _sum(*fc.values()) + keys + rows)


def mtp(folder: Path, target: Target) -> Published:
    """One of the target's own layers behind a projection, and the target's output layer."""
    hidden = target.hidden
    layers, own = target.layer(0, hidden), {"eh_proj.weight": (hidden, 2 * hidden)}
    config = {**target.config(1), "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    shapes = {name.replace("layers.0.", "model.layers.1."): shape for name, shape in (layers | {
        f"layers.0.{name}": shape for name, shape in own.items()}).items()}  # fmt: skip
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    _save(folder, config, shapes, {f"model.layers.1.{name}": hidden for name in norms})
    each = _sum(*layers.values(), *own.values(), (target.vocab, hidden))
    return Published({"method": "mtp"}, 1, lambda k: k * each)


KINDS: dict[str, Callable[[Path, Target], Published]] = {
    "eagle3": eagle3, "p-eagle": p_eagle, "dflash": dflash, "mtp": mtp,
}  # fmt: skip


def drafter_of(published: Published) -> Drafter:
    """A drafter that is not loaded yet."""
    options = dict(published.options)
    return create(options.pop("method"), options)


class HiddenStates(LMWithoutWeights):
    """Stands for a target: it has a dtype, a width, embeddings that are all zero and an output layer.

    Args:
        folder: of its checkpoint.
        target: its shape.
        dtype: that it computes in.
    """

    max_context, block_size = 4096, 16

    def __init__(self, folder: Path, target: Target, dtype: torch.dtype) -> None:
        self.name, self.vocab_size, self.dtype = str(folder), target.vocab, dtype
        self._hidden, self._output = target.hidden, CompiledProduct(_random((target.vocab, target.hidden)).to(dtype))
        self.num_blocks = self.num_free_blocks = 512

    def score(self, rows: Sequence[Row]) -> Tensor:
        """Nothing is scored."""
        raise NotImplementedError

    def release(self, handle: int) -> None:
        """Nothing is held."""

    def embed(self, tokens: Any) -> Tensor:
        """Of the right width."""
        return torch.zeros(len(tokens), self._hidden, dtype=self.dtype)

    def head(self, hidden: Tensor) -> Tensor:
        """By its output layer."""
        return self._output(hidden)


def _norms(num_layers: int) -> list[str]:
    return [f"layers.{i}.{name}_layernorm" for i in range(num_layers) for name in ("input", "post_attention")]


def _sum(*shapes: tuple[int, ...]) -> int:
    return sum(prod(shape) for shape in shapes)


def _random(shape: tuple[int, ...]) -> Tensor:
    where = "cuda" if torch.cuda.is_available() else "cpu"  # draws a billion numbers at once
    found: Tensor = torch.randn(shape, device=where) * shape[-1] ** -0.5
    return found.cpu()


def _save(
    folder: Path,
    config: dict[str, Any],
    shapes: Shapes,
    norms: dict[str, int],
    others: dict[str, Tensor] | None = None,
) -> None:
    """Write a folder in bfloat16, norms as ones."""
    folder.mkdir(parents=True)
    weights = {name: _random(shape).bfloat16() for name, shape in shapes.items()}
    weights |= {f"{name}.weight": torch.ones(size, dtype=torch.bfloat16) for name, size in norms.items()}
    save_file(weights | (others or {}), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
