"""torchao's quantized tensors, as transformers writes them into safetensors: parts, and a description in the metadata.

https://github.com/pytorch/ao/tree/main/torchao/prototype/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.files.layouts import Parts, scaled

ACTIVATIONS = ("_weight_act_pre_scale", "_weight_act_quant_scale", "_weight_act_quant_zero_point")
_KNOWN = {
    "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Int8StaticActivationInt8WeightConfig",
    "IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig", "Int8DynamicActivationInt4WeightConfig",
    "Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig",
}  # fmt: skip
_FOUR_BITS = {"Int4WeightOnlyConfig", "Float8DynamicActivationInt4WeightConfig"}


def is_known_torchao(settings: Mapping[str, Any]) -> bool:
    """Whether all tensors of a configuration have a layout that is undone here, and not one of a GPU's kernels."""
    given = settings.get("quant_type")
    return isinstance(given, dict) and _is_known(given.get("default"))


def _is_known(config: Any) -> bool:
    kind, data = (config.get("_type"), config.get("_data")) if isinstance(config, dict) else (None, None)
    data = data if isinstance(data, dict) else {}
    if kind in ("FqnToConfig", "ModuleFqnToConfig"):
        each = data.get("fqn_to_config") or data.get("module_fqn_to_config") or {}
        return bool(each) and all(nested is None or _is_known(nested) for nested in each.values())
    if kind in _FOUR_BITS:
        packing = data.get("int4_packing_format")
        return packing is None or (isinstance(packing, dict) and packing.get("_data") == "PLAIN")
    return kind in _KNOWN


def described(metadata: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Layers whose weight the metadata of a file describes, each with its class and attributes."""
    for key, value in metadata.items():
        if key.endswith(".weight"):
            with suppress(ValueError, RecursionError):
                message = json.loads(value)
                if isinstance(message, dict) and message.get("_type") not in (None, "Tensor"):
                    yield key.removesuffix(".weight"), message


def undo_torchao(parts: Parts, _: Mapping[str, Any], said: Any) -> Tensor:
    """A weight from torchao's parts.

    Args:
        parts: of the layer.
        said: class and attributes of its tensor, from the file's metadata.

    Raises:
        NotImplementedError: a class of tensors that is not read, with its name.
        ValueError: parts that do not fit each other.
    """
    kind = said.get("_type") if isinstance(said, dict) else None
    whole, scale, zeros = parts["_weight_qdata"], parts["_weight_scale"], parts.get("_weight_zero_point")
    if kind == "Int4Tensor":
        weight = _four_bits(whole, scale, zeros)
    elif kind in ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor"):
        block = _block(said)
        weight = scaled(whole.float(), scale, 0 if zeros is None else zeros, block)
    else:
        raise NotImplementedError(f"torchao's `{kind}`" if kind else "a tensor of torchao without a description")
    before = parts.get("_weight_act_pre_scale")  # of the inputs
    return weight if before is None else weight * before.float().reshape(1, -1)


def _block(said: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale.

    Raises:
        ValueError: the description says none of a matrix.
    """
    data = said.get("_data")
    given = data.get("block_size") if isinstance(data, dict) else None
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(size, int) and size > 0 for size in given):
        raise ValueError(f"blocks of {given}")
    return given[0], given[1]


def _four_bits(packed: Tensor, scale: Tensor, zeros: Tensor | None) -> Tensor:
    """Whole numbers from -8 to 7, two in a byte, the first in the low bits; scales and least numbers [groups, out]."""
    index = torch.stack((packed & 15, (packed >> 4) & 15), -1).flatten(1).to(torch.int32)
    spread = scaled((index ^ 8) - 8, scale.t())
    if zeros is None:
        return spread
    return spread + scaled(torch.ones_like(index), zeros.t())
