"""Names of a GGUF file's tensors in a model, and the order of their rows there."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec_cli.lm.files.gguf_header import GgufTensor

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules of Llama and families like it, by their names in a file."""
_EXPERTS = {"ffn_gate_exps": "gate_up_proj", "ffn_up_exps": "gate_up_proj", "ffn_down_exps": "down_proj"}
"""Experts of a file [E, I, hidden], and of the last [E, hidden, I], and transformers' parameters that they are in."""
_MIXTURES: dict[str, dict[str, str]] = {
    "mixtral": {"ffn_gate_inp": "mlp.gate"},
    "qwen3_moe": {"ffn_gate_inp": "mlp.gate"},
    "olmoe": {"ffn_gate_inp": "mlp.gate"},
    "gpt_oss": {"ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"},
}
"""Mixtures of experts by transformers' names for them, and their modules that Llama has not."""


class TensorNames(Protocol):
    """Where a file's tensors belong."""

    places: dict[str, str]
    """transformers' names by those of the file; some of these end before `.weight`."""

    def restored(self, key: str, numbers: NDArray[Any]) -> NDArray[Any]:
        """A tensor of the file as transformers has it: converters move the rows of some, or change their numbers."""

    def part_of(self, key: str, parameter: Tensor) -> Tensor:
        """The part of its place in the model that a tensor of the file fills, a view in the file's order."""

    def stays(self, key: str, tensor: GgufTensor) -> bool:
        """Whether the model has a tensor as it lies in the file, and nothing else in its place."""

    def store(self, key: str, numbers: NDArray[Any], weights: dict[str, Tensor]) -> None:
        """Put a whole tensor of the file where it belongs among the model's weights, which have room for it."""


class LlamaNames:
    """The names of Llama and families like it, for which no model of transformers has to be imported."""

    def __init__(self, config: Any) -> None:
        self._heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        self._is_turned = config.model_type in ("llama", "mixtral")
        self._is_transposed = config.model_type == "gpt_oss"
        mixture = _MIXTURES.get(config.model_type)
        modules, of_layer = dict(_OUTSIDE), _OF_LAYER | (mixture or {})
        for layer in range(config.num_hidden_layers):
            modules |= {f"blk.{layer}.{key}": f"model.layers.{layer}.{place}" for key, place in of_layer.items()}
        parts = ("weight", "bias")
        self.places = {f"{key}.{part}": f"{place}.{part}" for key, place in modules.items() for part in parts}
        for layer in range(config.num_hidden_layers if mixture else 0):
            for key, place in _EXPERTS.items():
                name = f"model.layers.{layer}.mlp.experts.{place}"
                self.places |= {f"blk.{layer}.{key}.weight": name, f"blk.{layer}.{key}.bias": f"{name}_bias"}
            self.places[f"blk.{layer}.attn_sinks.weight"] = f"model.layers.{layer}.self_attn.sinks"

    def restored(self, key: str, numbers: NDArray[Any]) -> NDArray[Any]:
        """A tensor of the file: of a Llama, the converter puts the rows side by side that a rotation pairs."""
        heads = self._heads.get(key.split(".")[-2]) if self._is_turned else None
        if heads is None:
            return numbers
        return numbers.reshape(heads, -1, 2, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)

    def part_of(self, key: str, parameter: Tensor) -> Tensor:
        """The part that a tensor fills: gate or up of a joined one, one behind the other or number by number."""
        what = experts_of(key)
        if what is None:
            return parameter
        if self._is_transposed and parameter.dim() == 3:
            parameter = parameter.transpose(1, 2)
        if what == "down":
            return parameter
        half, first = parameter.shape[1] // 2, what == "gate"
        if self._is_transposed:
            return parameter[:, 0 if first else 1 :: 2]
        return parameter[:, :half] if first else parameter[:, half:]

    def stays(self, key: str, tensor: GgufTensor) -> bool:
        """Whether a tensor is neither a Llama's queries or keys nor of experts."""
        is_moved = self._is_turned and key.split(".")[-2] in self._heads
        return not is_moved and experts_of(key) is None

    def store(self, key: str, numbers: NDArray[Any], weights: dict[str, Tensor]) -> None:
        """Put a whole tensor where it belongs."""
        restored = np.ascontiguousarray(self.restored(key, numbers))
        self.part_of(key, weights[self.places[key]]).copy_(torch.from_numpy(restored))


def experts_of(key: str) -> str | None:
    """Which layer of all experts a tensor of a file is or belongs to: gate, up or down; None for other tensors."""
    name = key.split(".")[-2:][0]
    return name.split("_")[1] if name in _EXPERTS else None


def is_mixture(config: Any) -> bool:
    """Whether these names are those of a mixture of experts."""
    return config.model_type in _MIXTURES


def place_of(names: TensorNames, key: str) -> str | None:
    """transformers' name of a file's tensor; None where the model has no such part."""
    return names.places.get(key) or names.places.get(key.removesuffix(".weight"))
