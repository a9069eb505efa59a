"""A GGUF file's tensors as parameters of a model: their names there, the order of their rows, and what does not fit."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specdec_cli.errors import WeightsError
from specdec_cli.lm.files.gguf_header import ROPE_FACTORS, GgufHeader, GgufTensor

OTHER = "choose the checkpoint with its safetensors"
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


class TensorNames(Protocol):
    """Where a file's tensors belong."""

    places: dict[str, str]
    """transformers' names by those of the file; some of these end before `.weight`."""

    def restored(self, key: str, numbers: NDArray[Any]) -> NDArray[Any]:
        """A tensor of the file as transformers has it: converters move the rows of some, or change their numbers."""


class LlamaNames:
    """The names of Llama and families like it, for which no model of transformers has to be imported.

    Args:
        config: of the model.
    """

    def __init__(self, config: Any) -> None:
        self._heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        self._is_turned = config.model_type == "llama"
        modules = dict(_OUTSIDE)
        for layer in range(config.num_hidden_layers):
            modules |= {f"blk.{layer}.{key}": f"model.layers.{layer}.{place}" for key, place in _OF_LAYER.items()}
        parts = ("weight", "bias")
        self.places = {f"{key}.{part}": f"{place}.{part}" for key, place in modules.items() for part in parts}

    def restored(self, key: str, numbers: NDArray[Any]) -> NDArray[Any]:
        """A tensor of the file: of a Llama, the converter puts the rows side by side that a rotation pairs."""
        heads = self._heads.get(key.split(".")[-2]) if self._is_turned else None
        if heads is None:
            return numbers
        return numbers.reshape(heads, -1, 2, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)


def tensor_names(header: GgufHeader, outline: Any) -> TensorNames:
    """The names of a file's tensors in a model."""
    if not _is_of_transformers(outline):
        return LlamaNames(outline.config)
    from specdec_cli.lm.files.gguf_weights import TransformersNames  # transformers' models behind it take seconds

    return TransformersNames(header, outline)


def place_of(names: TensorNames, key: str) -> str | None:
    """transformers' name of a file's tensor; None where the model has no such part."""
    return names.places.get(key) or names.places.get(key.removesuffix(".weight"))


def check_gguf_tensors(name: str, header: GgufHeader, outline: Any) -> None:
    """Refuse a GGUF file whose tensors are not those of its configuration, before one of them is read.

    Args:
        name: for messages.
        header: of the file.
        outline: of the model.

    Raises:
        WeightsError: a tensor is missing, has another shape, is of a type that is not read, or belongs to nothing.
    """
    unread = next((key for key, tensor in header.tensors.items() if not _is_read(tensor.kind)), None)
    if unread is not None:
        raise WeightsError(f"`{unread}` of `{name}` is in `{header.tensors[unread].kind}`, which is not read", OTHER)
    if _is_of_transformers(outline):
        from specdec_cli.lm.files.gguf_weights import names_missing_tensors

        if names_missing_tensors(header, outline):
            return
    names, wanted = tensor_names(header, outline), _shapes(outline)
    counts = dict.fromkeys(wanted, 0)
    wrong = []
    for key, tensor in header.tensors.items():
        place = place_of(names, key)
        if place in counts:
            counts[place] += tensor.num_numbers
            if not _fits(tensor, wanted[place]):
                wrong.append(f"`{key}` has another shape")
        elif key != ROPE_FACTORS:
            wrong.append(f"`{key}` is not read")
    tied = {**outline.all_tied_weights_keys} if outline.config.get_text_config().tie_word_embeddings else {}
    keys = {place: key for key, place in names.places.items()}
    for place, shape in wanted.items():
        if counts[place] != math.prod(shape) and place not in tied:
            what = "is missing" if not counts[place] else "has another shape"
            wrong.insert(0, f"`{keys.get(place, place)}` {what}")
    if wrong:
        raise WeightsError(f"the weights of `{name}` do not match its header: {wrong[0]}", OTHER)


def _is_of_transformers(outline: Any) -> bool:
    return type(outline).__module__.startswith("transformers.")


def _shapes(outline: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters as a file has them."""
    shapes = {key: tuple(tensor.shape) for key, tensor in outline.state_dict().items()}
    for key, module in outline.named_modules():
        if type(module).__name__ == "Conv1D":  # transformers keeps it the other way round
            shapes[f"{key}.weight"] = shapes[f"{key}.weight"][::-1]
    return shapes


def _fits(tensor: GgufTensor, shape: tuple[int, ...]) -> bool:
    """Whether a matrix of the file is one of the model's; what has more or fewer dimensions there is counted only."""
    return len(tensor.shape) != 2 or len(shape) != 2 or tensor.shape == shape


@cache
def _is_read(kind: str) -> bool:
    """Whether the gguf package dequantizes a type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    its_type = GGMLQuantizationType[kind]
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[its_type][1]), np.uint8), its_type)
    except NotImplementedError:
        return False
    return True
