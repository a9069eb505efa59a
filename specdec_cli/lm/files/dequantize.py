"""Quantized weights as plain numbers: the layouts of checkpoints that other programs write, undone layer by layer.

Only weights are undone. A form that also rounds activations (W8A8, FP8 with dynamic activations, BitNet) computes here
with the activations as they are. Tensors may be on paper (`paper`): the layouts are then undone in shape alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specdec_cli.errors import RunError

Parts = Mapping[str, Tensor]
_HINT = "copy or download the model again"
_PART = re.compile(r"(?P<layer>.+?)\.(?P<part>weight\.[^.]+|weight\.quant_state\.[^.]+|[^.]+)")
_ACTIVATIONS = {"input_scale", "input_zero_point", "output_scale", "output_zero_point", "input_global_scale"}
_ACTIVATIONS |= {"k_scale", "v_scale", "q_scale", "weight_format"}
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
_READ: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "gptq": {"bits": (2, 4, 8), "dynamic": (None, {}), "checkpoint_format": (None, "", "gptq", "gptq_v2")},
    "awq": {"bits": (4,), "version": (None, "gemm")},
    "mlx": {"bits": (2, 4, 8), "mode": (None, "affine")},
    "bitnet": {"use_rms_norm": (None, False), "quantization_mode": (None, "offline")},
}
"""Values of settings that are undone here, by `quant_method`."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One way in which a layer's weight is stored.

    Args:
        needs: parts that it consists of; a layer that has the first is stored so.
        may: parts that it may have beside them.
        undo: the weight [out, in] float32 from the parts, the settings and what the file says of the layer.
    """

    needs: tuple[str, ...]
    may: tuple[str, ...]
    undo: Callable[[Parts, Mapping[str, Any], Any], Tensor]


def plain_weights(
    name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], said: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """A checkpoint's tensors with plain weights in the place of quantized ones.

    Args:
        name: for messages.
        tensors: of its files, by name.
        settings: its `quantization_config`, of a form that `is_known`.
        said: what the files say of single layers (`descriptions`).
        dtype: of the plain weights.

    Raises:
        RunError: a part is missing, or does not fit the others.
    """
    layouts = _LAYOUTS[str(settings["quant_method"])]
    found: dict[str, Tensor] = {}
    for layer, parts in _layers(tensors).items():
        layout = next((one for one in layouts if _is_stored(parts, one)), None)
        if layout is None and "weight" in parts and parts["weight"].dtype not in _PLAIN:
            raise RunError(f"`{name}` has no scales of `{layer}.weight`, which is {_word(parts['weight'])}", _HINT)
        if layout is None:
            found |= {f"{layer}.{part}" if layer else part: tensor for part, tensor in parts.items()}
            continue
        for part in layout.needs:
            if part not in parts:
                raise RunError(f"`{name}` has no `{layer}.{part}`, which its quantized weight needs", _HINT)
        try:
            weight = layout.undo(parts, settings, said.get(layer))
        except (RuntimeError, IndexError, ValueError) as error:
            raise RunError(f"the parts of `{layer}.weight` of `{name}` do not fit each other", _HINT) from error
        found[f"{layer}.weight"] = weight.to(dtype)
        used = {*layout.needs, *layout.may, *_ACTIVATIONS}
        found |= {f"{layer}.{part}": tensor for part, tensor in parts.items() if part not in used}
    return found


def is_known(settings: Mapping[str, Any]) -> bool:
    """Whether this module knows the form of a `quantization_config`; `obstacle` tells of the variant."""
    return settings.get("quant_method") in _LAYOUTS


def obstacle(settings: Mapping[str, Any]) -> str | None:
    """The reason why a variant of a known form is not undone; None where it is.

    Args:
        settings: a `quantization_config` whose method is known here.
    """
    method = settings["quant_method"]
    if method == "compressed-tensors":
        return _compressed_obstacle(settings)
    layer = next((key for key, value in settings.items() if method == "mlx" and isinstance(value, dict)), None)
    if layer is not None:
        return f"`{layer}: {settings[layer]}`"
    for key, read in _READ.get(method, {}).items():
        value = settings.get(key)
        if (value.lower() if isinstance(value, str) else value) not in read:
            return f"`{key}: {value}`"
    return None


def descriptions(files: list[Path]) -> dict[str, Any]:
    """Shapes and block sizes of single layers, which safetensors files keep in small tensors, by the layer's name."""
    found: dict[str, Any] = {}
    for path in (path for path in files if path.suffix == ".safetensors"):
        with safe_open(path, framework="np") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                layer, _, part = key.partition(".weight.")
                if key.endswith(".weight_shape"):
                    found[key.removesuffix(".weight_shape")] = [int(size) for size in file.get_tensor(key)]
                elif part.startswith("quant_state."):
                    found[layer] = json.loads(file.get_tensor(key).tobytes())
    return found


def _word(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_stored(parts: Parts, layout: StoredWeight) -> bool:
    """Whether a layer is stored in a layout; numbers under the name `weight` may be plain."""
    first = parts.get(layout.needs[0])
    return first is not None and (layout.needs[0] != "weight" or first.dtype not in _PLAIN)


def _layers(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors by the layer that they belong to and the part of it that they are."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _PART.fullmatch(key)
        layer, part = (match["layer"], match["part"]) if match else ("", key)
        found.setdefault(layer, {})[part] = tensor
    return found


def _unpacked(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Whole numbers of a few bits from 32-bit words, the lowest bits first, along a dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    words = packed.view(torch.int32).unsqueeze(dim + 1)
    shape = [1] * words.dim()
    shape[dim + 1] = len(shifts)
    return ((words >> shifts.view(shape)) & ((1 << bits) - 1)).flatten(dim, dim + 1)


def _groups(scales: Tensor, num_inputs: int, dim: int) -> Tensor:
    """Scales of groups of inputs, repeated for each input."""
    return scales.float().repeat_interleave(num_inputs // scales.shape[dim], dim)


def _gptq(parts: Parts, settings: Mapping[str, Any], _: Any) -> Tensor:
    """GPTQ: words along the inputs, zero points less one in the first version of the format."""
    bits = int(settings["bits"])
    whole, zeros = _unpacked(parts["qweight"], bits, 0), _unpacked(parts["qzeros"], bits, 1)
    if settings.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = (zeros + 1) & ((1 << bits) - 1)
    if "g_idx" in parts:
        group = parts["g_idx"].long()
        return ((whole - zeros[group]) * parts["scales"].float()[group]).t()
    inputs = whole.shape[0]
    return ((whole - _groups(zeros, inputs, 0)) * _groups(parts["scales"], inputs, 0)).t()


def _awq(parts: Parts, settings: Mapping[str, Any], _: Any) -> Tensor:
    """AWQ's GEMM version: words along the outputs, in the order that its kernel wants."""
    order = torch.tensor(_AWQ_ORDER, device=parts["qweight"].device).argsort()
    words = [_unpacked(parts[part], 4, 1) for part in ("qweight", "qzeros")]
    whole, zeros = (word.view(len(word), -1, 8)[..., order].flatten(1) for word in words)
    inputs = whole.shape[0]
    return ((whole - _groups(zeros, inputs, 0)) * _groups(parts["scales"], inputs, 0)).t()


def _mlx(parts: Parts, settings: Mapping[str, Any], _: Any) -> Tensor:
    """MLX's affine quantization: words along the inputs, a scale and a least number for each group."""
    whole = _unpacked(parts["weight"], int(settings["bits"]), 1)
    return whole * _groups(parts["scales"], whole.shape[1], 1) + _groups(parts["biases"], whole.shape[1], 1)


def _bitnet(parts: Parts, settings: Mapping[str, Any], _: Any) -> Tensor:
    """BitNet's ternary weights, four in a byte, rows a quarter of the matrix apart; the older layer divides."""
    packed, scale = parts["weight"], parts["weight_scale"].float()
    whole = torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)]).float() - 1
    return whole * scale if settings.get("linear_class") == "autobitlinear" else whole / scale


def _compressed(parts: Parts, _: Mapping[str, Any], shape: list[int] | None) -> Tensor:
    """compressed-tensors' packed whole numbers, along the inputs, less half of their range."""
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    inputs = int(shape[1]) if shape is not None else packed.shape[1] * 8
    bits = 32 // -(-inputs // packed.shape[1])
    whole = _unpacked(packed, bits, 1)[:, :inputs] - (1 << (bits - 1))
    zeros: Tensor | int = 0
    if "weight_zero_point" in parts:
        zeros = parts["weight_zero_point"]
        if zeros.dtype == torch.int32:
            zeros = _unpacked(zeros, bits, 0)[: len(whole)] - (1 << (bits - 1))
    if "weight_g_idx" in parts:
        group = parts["weight_g_idx"].long()
        return (whole - (zeros[:, group] if isinstance(zeros, Tensor) else zeros)) * scale.float()[:, group]
    return _scaled(whole, scale, zeros)


def _scaled(whole: Tensor, scale: Tensor, zeros: Tensor | int = 0, block: tuple[int, int] | None = None) -> Tensor:
    """Numbers [out, in] by their scales.

    Args:
        whole: the numbers.
        scale: of the whole tensor, of each row [out] or [out, 1], of groups of inputs [out, groups], or of blocks.
        zeros: subtracted first, spread as the scales are.
        block: rows and columns of a block; the last ones may be smaller.
    """
    if scale.numel() == 1:
        return (whole.float() - zeros) * scale.float().reshape(())
    rows, columns = whole.shape
    spread = scale if scale.dim() == 2 else scale[:, None]
    high, wide = block if block is not None else (1, columns // spread.shape[1])
    wanted = (-(-rows // high), -(-columns // wide))
    if spread.shape != wanted:
        raise ValueError(f"scales {tuple(spread.shape)} for blocks {wanted}")
    if isinstance(zeros, Tensor):
        zeros = zeros.float().reshape(spread.shape).repeat_interleave(wide, 1)[:, :columns]
    by = spread.float().repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return (whole.float() - zeros) * by


def _compressed_whole(parts: Parts, settings: Mapping[str, Any], _: Any) -> Tensor:
    """compressed-tensors' int8 and FP8 weights, one number each."""
    whole, scale = parts["weight"].float(), parts["weight_scale"]
    is_blocks = scale.dim() == 2 and scale.shape[0] not in (1, len(whole))
    block = next(_blocks(settings), None) if is_blocks else None
    return _scaled(whole, scale, parts.get("weight_zero_point", 0), block)


def _blocks(settings: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """The sizes of blocks that a configuration of compressed-tensors names."""
    for group in settings["config_groups"].values():
        found = group["weights"].get("block_structure")
        if found:
            yield int(found[0]), int(found[1])


def _fp8(parts: Parts, settings: Mapping[str, Any], _: Any) -> Tensor:
    """DeepSeek's FP8 and its kin: a scale for the tensor or for blocks; of MXFP8 a power of two in a byte."""
    scale, block = parts["weight_scale_inv"], settings.get("weight_block_size")
    if scale.dtype == torch.uint8:
        scale = (scale.float() - 127).exp2()
    return _scaled(parts["weight"].float(), scale, 0, None if block is None else (int(block[0]), int(block[1])))


def _bitsandbytes_8bit(parts: Parts, _: Mapping[str, Any], __: Any) -> Tensor:
    """LLM.int8(): each row by its largest number (https://arxiv.org/abs/2208.07339)."""
    return parts["weight"].float() * (parts["SCB"].float() / 127)[:, None]


def _bitsandbytes_4bit(parts: Parts, _: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """QLoRA's four bits: an index into 16 numbers, and blocks by their largest (https://arxiv.org/abs/2305.14314)."""
    packed, largest = parts["weight"].flatten(), parts["weight.absmax"]
    if "weight.nested_absmax" in parts:  # the blocks' sizes are quantized themselves
        nested = parts["weight.nested_quant_map"].float()[largest.long()]
        by = parts["weight.nested_absmax"].float().repeat_interleave(int(state["nested_blocksize"]))[: len(nested)]
        largest = nested * by + float(state["nested_offset"])
    index = torch.stack((packed >> 4, packed & 15), 1).flatten().long()
    by = largest.float().repeat_interleave(int(state["blocksize"]))[: len(index)]
    return (parts["weight.quant_map"].float()[index] * by).view(*state["shape"])


def _compressed_obstacle(settings: Mapping[str, Any]) -> str | None:
    """Why a variant of compressed-tensors is not undone."""
    forms = list(_formats(settings))
    known = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"}
    unknown = next((form for form in forms if form not in known), None)
    if unknown is not None:
        return f"`format: {unknown}`"
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "a `sparsity_config`"
    if settings.get("transform_config"):
        return "a `transform_config`"
    return None


def _formats(settings: Mapping[str, Any]) -> Iterator[str]:
    """The formats that a configuration of compressed-tensors names."""
    yield str(settings.get("format", "dense"))
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict) and group.get("format"):
            yield str(group["format"])


_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_LAYOUTS: Mapping[str, tuple[StoredWeight, ...]] = {
    "gptq": (StoredWeight(("qweight", "qzeros", "scales"), ("g_idx",), _gptq),),
    "awq": (StoredWeight(("qweight", "qzeros", "scales"), (), _awq),),
    "mlx": (StoredWeight(("weight", "scales", "biases"), (), _mlx),),
    "bitnet": (StoredWeight(("weight", "weight_scale"), (), _bitnet),),
    **dict.fromkeys(("fp8", "mxfp8"), (StoredWeight(("weight", "weight_scale_inv"), ("activation_scale",), _fp8),)),
    "compressed-tensors": (
        StoredWeight(
            ("weight_packed", "weight_scale"), ("weight_shape", "weight_zero_point", "weight_g_idx"), _compressed
        ),
        StoredWeight(("weight", "weight_scale"), ("weight_zero_point",), _compressed_whole),
    ),
    "bitsandbytes": (
        StoredWeight(
            ("weight.quant_map", "weight", "weight.absmax"),
            ("weight.nested_absmax", "weight.nested_quant_map", *_STATES),
            _bitsandbytes_4bit,
        ),
        StoredWeight(("weight", "SCB"), (), _bitsandbytes_8bit),
    ),
}
"""Layouts by `quant_method`."""
