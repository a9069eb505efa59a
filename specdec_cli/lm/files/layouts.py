"""Layouts of quantized weights in checkpoints: for each a function that makes plain numbers [out, in] of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Parts = Mapping[str, Tensor]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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


def gptq(parts: Parts, settings: Mapping[str, Any], _: Any) -> Tensor:
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


def awq(parts: Parts, settings: Mapping[str, Any], _: Any) -> Tensor:
    """AWQ's GEMM version: words along the outputs, in the order that its kernel wants."""
    order = torch.tensor(_AWQ_ORDER, device=parts["qweight"].device).argsort()
    words = [_unpacked(parts[part], 4, 1) for part in ("qweight", "qzeros")]
    whole, zeros = (word.view(len(word), -1, 8)[..., order].flatten(1) for word in words)
    inputs = whole.shape[0]
    return ((whole - _groups(zeros, inputs, 0)) * _groups(parts["scales"], inputs, 0)).t()


def mlx(parts: Parts, settings: Mapping[str, Any], _: Any) -> Tensor:
    """MLX's affine quantization: words along the inputs, a scale and a least number for each group."""
    whole = _unpacked(parts["weight"], int(settings["bits"]), 1)
    return whole * _groups(parts["scales"], whole.shape[1], 1) + _groups(parts["biases"], whole.shape[1], 1)


def bitnet(parts: Parts, settings: Mapping[str, Any], _: Any) -> Tensor:
    """BitNet's ternary weights, four in a byte, rows a quarter of the matrix apart; the older layer divides."""
    packed, scale = parts["weight"], parts["weight_scale"].float()
    whole = torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)]).float() - 1
    return whole * scale if settings.get("linear_class") == "autobitlinear" else whole / scale


def compressed(parts: Parts, _: Mapping[str, Any], shape: list[int] | None) -> Tensor:
    """compressed-tensors' packed numbers, along the inputs: FP4, or whole ones less half of their range."""
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    if packed.dtype == torch.uint8:
        return _four_bit_floats(packed, scale, 1 / parts.get("weight_global_scale", torch.ones(1)).float())
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
    return scaled(whole, scale, zeros)


def _four_bit_floats(packed: Tensor, scale: Tensor, by: Tensor) -> Tensor:
    """NVFP4 and MXFP4: E2M1 numbers, two in a byte, the first in the low bits, and scales of groups of inputs.

    Args:
        packed: [out, in / 2] uint8.
        scale: [out, groups], FP8 (E4M3) or the exponents of powers of two in bytes.
        by: the whole tensor's scale, one number.
    """
    index = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
    size = 32 if scale.dtype == torch.uint8 else 16
    if scale.shape != (len(index), index.shape[1] // size):
        raise ValueError(f"scales {tuple(scale.shape)} for groups of {size}")
    numbers = torch.tensor(_E2M1 + tuple(-one for one in _E2M1), device=packed.device)[index]
    return scaled(numbers, _powers(scale) * by.reshape(()))


def _powers(scale: Tensor) -> Tensor:
    """Scales as numbers: bytes are exponents of two (E8M0)."""
    return (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()


def modelopt_fp4(parts: Parts, _: Mapping[str, Any], __: Any) -> Tensor:
    """ModelOpt's NVFP4."""
    return _four_bit_floats(parts["weight"], parts["weight_scale"], parts["weight_scale_2"].float())


def modelopt_fp8(parts: Parts, _: Mapping[str, Any], __: Any) -> Tensor:
    """ModelOpt's FP8, with a scale for the tensor."""
    if parts["weight"].dtype != torch.float8_e4m3fn:
        raise ValueError(f"a weight of {parts['weight'].dtype} without a second scale")
    return scaled(parts["weight"].float(), parts["weight_scale"])


def scaled(whole: Tensor, scale: Tensor, zeros: Tensor | int = 0, block: tuple[int, int] | None = None) -> Tensor:
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


def compressed_whole(parts: Parts, settings: Mapping[str, Any], _: Any) -> Tensor:
    """compressed-tensors' int8 and FP8 weights, one number each."""
    whole, scale = parts["weight"].float(), _powers(parts["weight_scale"])
    is_blocks = scale.dim() == 2 and scale.shape[0] not in (1, len(whole))
    block = next(_blocks(settings), None) if is_blocks else None
    return scaled(whole, scale, parts.get("weight_zero_point", 0), block)


def _blocks(settings: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """The sizes of blocks that a configuration of compressed-tensors names."""
    for group in settings["config_groups"].values():
        found = group["weights"].get("block_structure")
        if found:
            yield int(found[0]), int(found[1])


def fp8(parts: Parts, settings: Mapping[str, Any], _: Any) -> Tensor:
    """DeepSeek's FP8 and its kin: a scale for the tensor or for blocks; of MXFP8 a power of two in a byte."""
    scale, block = _powers(parts["weight_scale_inv"]), settings.get("weight_block_size")
    return scaled(parts["weight"].float(), scale, 0, None if block is None else (int(block[0]), int(block[1])))


def bitsandbytes_8bit(parts: Parts, _: Mapping[str, Any], __: Any) -> Tensor:
    """LLM.int8(): each row by its largest number (https://arxiv.org/abs/2208.07339)."""
    return parts["weight"].float() * (parts["SCB"].float() / 127)[:, None]


def bitsandbytes_4bit(parts: Parts, _: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """QLoRA's four bits: an index into 16 numbers, and blocks by their largest (https://arxiv.org/abs/2305.14314)."""
    packed, largest = parts["weight"].flatten(), parts["weight.absmax"]
    if "weight.nested_absmax" in parts:  # the blocks' sizes are quantized themselves
        nested = parts["weight.nested_quant_map"].float()[largest.long()]
        by = parts["weight.nested_absmax"].float().repeat_interleave(int(state["nested_blocksize"]))[: len(nested)]
        largest = nested * by + float(state["nested_offset"])
    index = torch.stack((packed >> 4, packed & 15), 1).flatten().long()
    by = largest.float().repeat_interleave(int(state["blocksize"]))[: len(index)]
    return (parts["weight.quant_map"].float()[index] * by).view(*state["shape"])
