"""Layouts of quantized weights in checkpoints: for each a function that makes numbers [out, in] of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Integers:
    """A weight [out, in] in whole numbers: what is left of each less its group's zero point, times the group's scale.

    Args:
        unpack: gives the numbers [out, in] int32, 0 to 2^bits - 1.
        shape: out and in.
        bits: of each.
        zeros: [out, groups].
        scales: [out, groups].
        group: [in] int64, the group of each input; None where groups follow each other and have one size.
    """

    unpack: Callable[[], Tensor]
    shape: tuple[int, int]
    bits: int
    zeros: Tensor
    scales: Tensor
    group: Tensor | None = None

    @property
    def fits(self) -> bool:
        """Whether its parts fit each other."""
        num_groups = self.scales.shape[-1]
        if self.scales.shape != (self.shape[0], num_groups) or self.zeros.shape != self.scales.shape:
            return False
        if self.group is None:
            return num_groups > 0 and self.shape[1] % num_groups == 0
        return len(self.group) == self.shape[1] and 0 <= int(self.group.min()) <= int(self.group.max()) < num_groups

    def plain(self) -> Tensor:
        """The weight in float32."""
        if self.group is None:
            return scaled(self.unpack(), self.scales, self.zeros)
        return (self.unpack() - self.zeros[:, self.group]) * self.scales.float()[:, self.group]


def gptq(parts: Parts, settings: Mapping[str, Any], _: Any) -> Integers:
    """GPTQ: words along the inputs, zero points less one in the first version of the format."""
    bits = int(settings["bits"])
    zeros = _unpacked(parts["qzeros"], bits, 1)
    if settings.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = (zeros + 1) & ((1 << bits) - 1)
    group = parts["g_idx"].long() if "g_idx" in parts else None
    words, scales = parts["qweight"], parts["scales"].t()
    shape = words.shape[1], words.shape[0] * 32 // bits
    return Integers(lambda: _unpacked(words, bits, 0).t(), shape, bits, zeros.t(), scales, group)


def awq(parts: Parts, _: Mapping[str, Any], __: Any) -> Integers:
    """AWQ's GEMM version: words along the outputs, in the order that its kernel wants."""
    order = torch.tensor(_AWQ_ORDER, device=parts["qweight"].device).argsort()

    def unpacked(part: str) -> Tensor:
        words = _unpacked(parts[part], 4, 1)
        return words.view(len(words), -1, 8)[..., order].flatten(1).t()

    shape = parts["qweight"].shape[1] * 8, parts["qweight"].shape[0]
    return Integers(lambda: unpacked("qweight"), shape, 4, unpacked("qzeros"), parts["scales"].t())


def mlx(parts: Parts, settings: Mapping[str, Any], _: Any) -> Tensor:
    """MLX's affine quantization: words along the inputs, a scale and a least number for each group."""
    whole = _unpacked(parts["weight"], int(settings["bits"]), 1)
    return whole * _groups(parts["scales"], whole.shape[1], 1) + _groups(parts["biases"], whole.shape[1], 1)


def bitnet(parts: Parts, settings: Mapping[str, Any], _: Any) -> Tensor:
    """BitNet's ternary weights, four in a byte, rows a quarter of the matrix apart; the older layer divides."""
    packed, scale = parts["weight"], parts["weight_scale"].float()
    whole = torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)]).float() - 1
    return whole * scale if settings.get("linear_class") == "autobitlinear" else whole / scale


def compressed(parts: Parts, _: Mapping[str, Any], shape: list[int] | None) -> Tensor | Integers:
    """compressed-tensors' packed numbers, along the inputs: FP4, or whole ones."""
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    if packed.dtype == torch.uint8:
        return _four_bit_floats(packed, scale, 1 / parts.get("weight_global_scale", torch.ones(1)).float())
    inputs = int(shape[1]) if shape is not None else packed.shape[1] * 8
    bits = 32 // -(-inputs // packed.shape[1])
    zeros = parts.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = _unpacked(zeros, bits, 0)[: len(packed)]
    elif zeros is not None:
        zeros = zeros.int() + (1 << (bits - 1))
    group = parts["weight_g_idx"].long() if "weight_g_idx" in parts else None
    zeros_and_scales = _zeros_and_scales(scale, zeros, bits, len(packed))
    return Integers(
        lambda: _unpacked(packed, bits, 1)[:, :inputs], (len(packed), inputs), bits, *zeros_and_scales, group
    )


def _zeros_and_scales(scale: Tensor, zeros: Tensor | None, bits: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Zero points, half of the range where there are none, and scales, each [out, groups]."""
    if scale.dim() < 2:
        scale = scale.reshape(-1, 1)
    scale = scale.expand(outputs, -1) if scale.shape == (1, 1) else scale
    if zeros is None:
        return torch.full(scale.shape, 1 << (bits - 1), dtype=torch.int32, device=scale.device), scale
    return zeros.reshape(-1, 1 if zeros.dim() < 2 else zeros.shape[1]).expand(scale.shape), scale


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
    numbers = torch.tensor(_E2M1 + tuple(-number for number in _E2M1), device=packed.device)[index]
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


def compressed_whole(parts: Parts, settings: Mapping[str, Any], _: Any) -> Tensor | Integers:
    """compressed-tensors' int8 and FP8 weights, one number each."""
    weight, scale, zeros = parts["weight"], _powers(parts["weight_scale"]), parts.get("weight_zero_point")
    is_blocks = scale.dim() == 2 and scale.shape[0] not in (1, len(weight))
    if weight.dtype == torch.int8 and not is_blocks:
        zeros = None if zeros is None else zeros.int() + 128
        zeros_and_scales = _zeros_and_scales(parts["weight_scale"], zeros, 8, len(weight))
        return Integers(lambda: weight.int() + 128, (len(weight), weight.shape[1]), 8, *zeros_and_scales)
    block = next(_blocks(settings), None) if is_blocks else None
    return scaled(weight.float(), scale, 0 if zeros is None else zeros, block)


def _blocks(settings: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """The sizes of blocks that a configuration of compressed-tensors names."""
    for group in settings["config_groups"].values():
        block_sizes = group["weights"].get("block_structure")
        if block_sizes:
            yield int(block_sizes[0]), int(block_sizes[1])


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
