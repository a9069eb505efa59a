"""Products of a few rows with a weight on a GPU, in Triton: as fast as the weight is read, and the same in any company.

Libraries choose another kernel, and another order of summing, for every number of rows. Here a program reads some of
the weight's rows and multiplies them with all rows of activations, from the first number of the inner dimension to the
last: what a row gets does not depend on how many others there are. More rows than `MOST_ROWS` are torch's product's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specdec_cli.lm.kernels.linear import PackedLinear, plain_integer_product

MOST_ROWS = 64
_LEAST_ROWS = 16  # of a tensor core's product
_MANY_OUTPUTS = 16384
_FEW_OUTPUTS, _MANY_INPUTS = 4608, 8192


@triton.jit
def _kernel(
    x, weight, bias, scales, output, num_rows, num_outputs, num_inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some outputs of all rows: x [n, in] · weight [out, in]ᵀ · scales [out] + bias [out]; INPUTS divides `in`."""
    out = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row, inner = tl.arange(0, ROWS), tl.arange(0, INPUTS)
    is_row, is_out = row < num_rows, out < num_outputs
    of_weight = weight + out.to(tl.int64)[:, None] * num_inputs + inner[None, :]
    of_x = x + row[:, None] * num_inputs + inner[None, :]
    left = tl.load(of_weight, is_out[:, None], 0.0)  # weights never change: read them while others still compute
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.dot(left, tl.trans(tl.load(of_x, is_row[:, None], 0.0)))
    for first in tl.range(INPUTS, num_inputs, INPUTS, num_stages=STAGES):
        left = tl.load(of_weight + first, is_out[:, None], 0.0)
        right = tl.load(of_x + first, is_row[:, None], 0.0)
        total = tl.dot(left, tl.trans(right), total, out_dtype=total.dtype)
    if HAS_SCALES:
        total = total.to(tl.float32) * tl.load(scales + out, is_out, 0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + out, is_out, 0.0).to(tl.float32)[:, None]
    to = output + row[None, :] * num_outputs + out[:, None]
    tl.store(to, total.to(output.dtype.element_ty), is_row[None, :] & is_out[:, None])


class FewRowsLinear(PackedLinear):
    """The product with a weight [out, in] of 16 bits as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], weight.numel() * weight.element_size(), bias)
        self._weight = weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        product: Tensor = _multiply(x, self._weight, self.bias)
        return product


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] · weight [out, in]ᵀ + bias [out]: [..., out]."""
    rows = x.reshape(-1, weight.shape[1])
    if len(rows) > MOST_ROWS or not fits(weight):
        return F.linear(x, weight, bias)
    return _run(rows, weight, bias, None, x.dtype).view(*x.shape[:-1], len(weight))


def multiply_whole(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Whole numbers: rows [n, in] int8 · weight [out, in]ᵀ int8 · scales [out] float32: [n, out] float32."""
    if len(rows) > MOST_ROWS or not fits(weight):
        return plain_integer_product(rows, weight, scales)
    return _run(rows, weight, None, scales, torch.float32)


def _run(rows: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    num_outputs, num_inputs = weight.shape
    output = rows.new_empty((len(rows), num_outputs), dtype=dtype)
    outputs, inputs, warps, stages = shape_of_program(num_outputs, num_inputs)
    kernel: Any = _kernel
    kernel[(triton.cdiv(num_outputs, outputs),)](
        rows.contiguous(), weight, bias, scales, output, len(rows), num_outputs, num_inputs,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(len(rows))), OUTPUTS=outputs,
        INPUTS=inputs * 2 // weight.element_size(), STAGES=stages,
        HAS_BIAS=bias is not None, HAS_SCALES=scales is not None, num_warps=warps, **early(rows.device),
    )  # fmt: skip
    return output


@functools.cache
def early(device: torch.device) -> dict[str, bool]:
    """How kernels are launched that begin while the one before them ends, and wait for it themselves: from Hopper on.

    CUDA calls it programmatic dependent launch.
    """
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


def fits(weight: Tensor) -> bool:
    """Whether a weight's rows are multiples of the 256 bytes that a program reads; float32 is none of its dtypes."""
    size = weight.element_size()
    return size <= 2 and weight.shape[1] * size % 256 == 0 and weight.is_contiguous()


def shape_of_program(num_outputs: int, num_inputs: int) -> tuple[int, int, int, int]:
    """Outputs and inputs of 16 bits that a program takes at once, its warps and stages: the best of 18 on an H100."""
    if num_outputs >= _MANY_OUTPUTS:
        return 128, 128, 8, 3
    if num_outputs < _FEW_OUTPUTS and num_inputs > _MANY_INPUTS and num_inputs % 512 == 0:
        return 32, 256, 4, 4
    return 64, 128, 4, 5


_multiply: Any = torch.library.custom_op("specdec::multiply", multiply, mutates_args=())


@_multiply.register_fake
def _shape_of_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


integer_product: Any = torch.library.custom_op("specdec::multiply_whole", multiply_whole, mutates_args=())


@integer_product.register_fake
def _shape_of_whole_product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[0]), dtype=torch.float32)  # `len` would fix the number
