"""Linear layers whose weights are packed once, at load, for this machine's kernels.

packed: oneDNN's own layout of a float32 or bfloat16 weight, which its product otherwise makes again at every call.
int8: one scale for each output channel, one for each row of activations; never one for a whole batch, which would make
rows depend on each other. Both give a row the same bits in any company of two rows or more (`doctor` tries it).

The operators are private to torch: they are named here only. `kinds` tries them before a model uses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Whole weight [out, in] int8 and scales [out] → a product that takes rows [n, in] u8, 128 above zero: [n, out] float32.
IntegerProduct = Callable[[Tensor, Tensor], Callable[[Tensor], Tensor]]

# Activations are unsigned for VNNI: 0 becomes 128, and the kernel takes it off again. 128.5, because a cast cuts down.
ZERO_POINT = 128
_MIDDLE = torch.tensor(ZERO_POINT + 0.5)
_LARGEST = 127
_ROWS = 1024  # of a weight that are float32 together while it is quantized
_EXACT_INPUTS = 1024  # 1024 products of 127 and 128 are less than 2^24, up to which float32 has every whole number
_NO_ARGUMENTS: list[Any] = []
# With fewer rows oneDNN's float32 product waits for its own sums: five take less time than one to three do.
_LEAST_ROWS = {torch.float32: 5}


class PackedLinear(nn.Module):
    """A linear layer: x [..., in] gives x · weightᵀ + bias [..., out] in x's dtype.

    Args:
        num_inputs: in.
        num_outputs: out.
        num_bytes: the packed weight and its scales, which a product reads.
        bias: [out], or None.
    """

    def __init__(self, num_inputs: int, num_outputs: int, num_bytes: int, bias: Tensor | None) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.num_outputs = num_outputs
        self.num_bytes = num_bytes
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def num_parameters(self) -> int:
        """Numbers in the weight."""
        return self.num_inputs * self.num_outputs

    def extra_repr(self) -> str:
        """The text that `print(model)` shows."""
        return f"{self.num_inputs}, {self.num_outputs}, bias={self.bias is not None}, {self.num_bytes} bytes"


class PlainLinear(PackedLinear):
    """torch's own product with the weight [out, in] as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], weight.numel() * weight.element_size(), bias)
        self._weight = weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        return F.linear(x, self._weight, self.bias)


class OneDnnLinear(PackedLinear):
    """oneDNN's product with a float32 or bfloat16 weight [out, in] in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], weight.numel() * weight.element_size(), bias)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        return onednn_product(x, self._weight, self.bias, self.num_outputs)


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    """oneDNN's product of x [..., in] with a weight [out, in], in its layout or as it is, with a bias: [..., out]."""
    product = torch.ops.mkldnn._linear_pointwise.default
    num_rows, least = x.numel() // x.shape[-1], _LEAST_ROWS.get(x.dtype, 1)
    if num_rows >= least:
        output: Tensor = product(x, weight, bias, "none", _NO_ARGUMENTS, "")
        return output
    rows = F.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, least - num_rows))
    output = product(rows, weight, bias, "none", _NO_ARGUMENTS, "")
    return output[:num_rows].view(*x.shape[:-1], num_outputs)


class Int8Linear(PackedLinear):
    """Whole numbers times whole numbers, then a row's scale times a channel's; x of any floating dtype.

    Args:
        weight: [out, in], floating.
        bias: [out], or None.
        product: makes the product of whole numbers: `vnni_product` or `signed_product`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, product: IntegerProduct) -> None:
        num_outputs, num_inputs = weight.shape
        super().__init__(num_inputs, num_outputs, num_inputs * num_outputs + 4 * num_outputs, bias)
        self._integers = product(*quantized(weight.detach()))
        self._middle = _MIDDLE.to(weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        rows = x.reshape(-1, self.num_inputs).float()
        largest = row_scales(rows)
        # A row of zeros divides 0 by 0; whatever that becomes as a whole number, its scale of 0 makes it 0 again.
        output = self._integers(torch.addcdiv(self._middle, rows, largest, value=_LARGEST).to(torch.uint8)).mul_(
            largest
        )
        if self.bias is not None:
            output.add_(self.bias)
        return output.to(x.dtype).view(*x.shape[:-1], self.num_outputs)


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [out, in] in whole numbers [out, in] int8, and what a product of them with a row's is multiplied with.

    That scale [out] float32 is the channel's 1/127 and the activations' too, whose own is then their largest number.
    """
    whole = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    for part, its_whole, its_scales in zip(
        *(torch.split(tensor, _ROWS) for tensor in (weight, whole, scales)), strict=True
    ):
        largest = part.abs().amax(1).float().clamp(min=torch.finfo(torch.float32).tiny)
        its_whole.copy_((part.float() * (_LARGEST / largest)[:, None]).round_())
        its_scales.copy_(largest / _LARGEST**2)
    return whole, scales


def row_scales(rows: Tensor) -> Tensor:
    """The largest magnitude of each row of [n, in]: [n, 1]. A row's own, so that it does not see its company."""
    return rows.abs().amax(-1, True)


def vnni_product(weight: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    """oneDNN's: u8 rows [n, in] minus 128 times int8 weight [out, in], times scales [out]: float32 [n, out]."""
    product = torch.ops.onednn.qlinear_pointwise.default
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    zeros = _zeros(len(scales))

    def multiply(rows: Tensor) -> Tensor:
        output: Tensor = product(
            rows, 1.0, ZERO_POINT, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", _NO_ARGUMENTS, ""
        )
        return output

    return multiply


@functools.cache
def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def plain_integer_product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """torch's: rows [n, in] int8 times weight [out, in] int8, times scales [out]: float32 [n, out].

    What it takes no less of on a device is filled up with zeros.
    """
    (num_rows, num_inputs), num_outputs = rows.shape, len(weight)
    least_rows, multiple = _smallest(weight.device)
    columns = _filled(weight, -num_outputs % multiple, -num_inputs % multiple).t()
    padded = _filled(rows, max(least_rows - num_rows, 0), -num_inputs % multiple)
    return torch._int_mm(padded, columns)[:num_rows, :num_outputs] * scales


def float_integer_product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The same by float32 products of so few inputs that their sums are exact: for CPUs where torch's saturates."""
    whole = torch.zeros(len(rows), len(weight), dtype=torch.int32)
    for start in range(0, rows.shape[1], _EXACT_INPUTS):
        some = slice(start, start + _EXACT_INPUTS)
        whole += F.linear(rows[:, some].float(), weight[:, some].float()).to(torch.int32)
    return whole * scales


def _filled(matrix: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """A matrix with so many more rows and columns of zeros; the same one where it needs none."""
    return F.pad(matrix, (0, num_columns, 0, num_rows)) if num_rows or num_columns else matrix


def _smallest(device: torch.device) -> tuple[int, int]:
    """Rows that torch's integer product takes at least, and what its sides are multiples of: more with CUDA."""
    return (17, 8) if device.type == "cuda" else (1, 1)


def signed_product(
    weight: Tensor, scales: Tensor, multiply: Callable[[Tensor, Tensor, Tensor], Tensor] = plain_integer_product
) -> Callable[[Tensor], Tensor]:
    """The same numbers as `vnni_product`'s, by a product `multiply` that takes signed rows."""
    return lambda rows: multiply(rows.sub(ZERO_POINT).view(torch.int8), weight, scales)
