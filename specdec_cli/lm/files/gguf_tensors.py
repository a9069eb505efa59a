"""A GGUF file's tensors as parameters of a model, and those that do not fit."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch

from specdec_cli.errors import WeightsError
from specdec_cli.lm.files.gguf_header import ROPE_FACTORS, GgufHeader, GgufTensor
from specdec_cli.lm.files.gguf_names import LlamaNames, TensorNames, is_mixture, place_of
from specdec_cli.lm.files.reading import other_shape

OTHER = "choose the checkpoint with its safetensors"


def tensor_names(header: GgufHeader, outline: Any) -> TensorNames:
    """The names of a file's tensors in a model."""
    if _has_own_names(outline):
        return LlamaNames(outline.config)
    from specdec_cli.lm.files.gguf_weights import TransformersNames  # transformers' models behind it take seconds

    return TransformersNames(header, outline)


def check_gguf_tensors(name: str, header: GgufHeader, outline: Any) -> None:
    """Refuse a GGUF file whose tensors are not those of its configuration, before one of them is read.

    Raises:
        WeightsError: a tensor is missing, has another shape, is of a type that is not read, or belongs to nothing.
    """
    unread = next((key for key, tensor in header.tensors.items() if not _is_read(tensor.kind)), None)
    if unread is not None:
        raise WeightsError(f"`{unread}` of `{name}` is in `{header.tensors[unread].kind}`, which is not read", OTHER)
    if not _has_own_names(outline):
        from specdec_cli.lm.files.gguf_weights import names_missing_tensors

        if names_missing_tensors(header, outline):
            return
    names, wanted = tensor_names(header, outline), _shapes(outline)
    stored: dict[str, list[tuple[int, ...]]] = {place: [] for place in wanted}
    wrong = []
    for key, tensor in header.tensors.items():
        place = place_of(names, key)
        if place in stored:
            stored[place].append(tensor.shape)
            part = names.part_of(key, torch.empty(wanted[place], device="meta"))
            if not _fits(tensor, tuple(part.shape)):
                wrong.append(other_shape(key, tensor.shape, part.shape))
        elif key != ROPE_FACTORS:
            wrong.append(f"`{key}` is not read")
    tied = {**outline.all_tied_weights_keys} if outline.config.get_text_config().tie_word_embeddings else {}
    keys = {place: key for key, place in names.places.items()}
    for place, shape in wanted.items():
        key, parts = keys.get(place, place), stored[place]
        if place in tied or sum(map(math.prod, parts)) == math.prod(shape):
            continue
        if len(parts) == 1:
            wrong.insert(0, other_shape(key, parts[0], shape))
        else:
            wrong.insert(0, f"`{key}` {'has another shape' if parts else 'is missing'}")
    if wrong:
        raise WeightsError(f"the weights of `{name}` do not match its header: {wrong[0]}", OTHER)


def _has_own_names(outline: Any) -> bool:
    return is_mixture(outline.config) or not type(outline).__module__.startswith("transformers.")


def _shapes(outline: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters as a file has them."""
    shapes = {key: tuple(tensor.shape) for key, tensor in outline.state_dict().items()}
    for key, module in outline.named_modules():
        if type(module).__name__ == "Conv1D":  # transformers keeps it the other way round
            shapes[f"{key}.weight"] = shapes[f"{key}.weight"][::-1]
    return shapes


def _fits(tensor: GgufTensor, shape: tuple[int, ...]) -> bool:
    """Whether a matrix of the file is one of the model's; what has more or fewer dimensions there is counted only."""
    is_counted = len(tensor.shape) != len(shape) or len(shape) < 2
    return is_counted or tensor.shape == shape


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
