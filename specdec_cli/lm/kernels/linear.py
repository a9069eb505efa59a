"""Linear layers whose weights are packed once, at load, for this machine's kernels.

bf16: oneDNN's own layout of the weight, which its product otherwise makes anew at every call. int8: one scale for each
output channel, one for each row of activations; never one for a whole batch, which would make rows depend on each
other. Both give a row the same bits in any company of two rows or more (`doctor` tries it).

The operators are private to torch: they are named here only, and tried before they are used. Where they are missing
or wrong, bf16 stays torch's plain product and int8 takes torch's plain integer product; `doctor` says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec_cli.lm.files.checkpoint import first_line

Kind = Literal["plain", "bf16", "int8", "few rows"]

# Activations are unsigned for VNNI: 0 becomes 128, and the kernel takes it off again. 128.5, because a cast cuts down.
_ZERO_POINT = 128
_MIDDLE = torch.tensor(_ZERO_POINT + 0.5)
_LARGEST = 127
_NO_ARGUMENTS: list[Any] = []


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
        """What `print(model)` shows."""
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
    """oneDNN's product with a bfloat16 weight [out, in] in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], weight.numel() * weight.element_size(), bias)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        found: Tensor = self._product(x, self._weight, self.bias, "none", _NO_ARGUMENTS, "")
        return found


class Int8Linear(PackedLinear):
    """Whole numbers times whole numbers, then a row's scale times a channel's; x of any floating dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        num_outputs, num_inputs = weight.shape
        super().__init__(num_inputs, num_outputs, num_inputs * num_outputs + 4 * num_outputs, bias)
        is_fast = weight.device.type == "cpu" and missing("int8") is None
        self._integers = (_vnni_product if is_fast else _signed_product)(*quantized(weight.detach()))
        self._middle = _MIDDLE.to(weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        rows = x.reshape(-1, self.num_inputs).float()
        largest = row_scales(rows)
        # A row of zeros divides 0 by 0; whatever that becomes as a whole number, its scale of 0 makes it 0 again.
        found = self._integers(torch.addcdiv(self._middle, rows, largest, value=_LARGEST).to(torch.uint8)).mul_(largest)
        if self.bias is not None:
            found.add_(self.bias)
        return found.to(x.dtype).view(*x.shape[:-1], self.num_outputs)


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [out, in] in whole numbers [out, in] int8, and what a product of them with a row's is multiplied with.

    That scale [out] float32 is the channel's 1/127 and the activations' too, whose own is then their largest number.
    """
    largest = weight.abs().amax(1).float().clamp(min=torch.finfo(torch.float32).tiny)
    whole = (weight.float() * (_LARGEST / largest)[:, None]).round_().to(torch.int8)
    return whole, largest / _LARGEST**2


def row_scales(rows: Tensor) -> Tensor:
    """The largest magnitude of each row of [n, in]: [n, 1]. A row's own, so that it does not see its company."""
    return rows.abs().amax(-1, True)


def _vnni_product(weight: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    """oneDNN's: u8 rows [n, in] minus 128 times int8 weight [out, in], times scales [out]: float32 [n, out]."""
    product = torch.ops.onednn.qlinear_pointwise.default
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    zeros = _zeros(len(scales))

    def multiply(rows: Tensor) -> Tensor:
        found: Tensor = product(
            rows, 1.0, _ZERO_POINT, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", _NO_ARGUMENTS, ""
        )
        return found

    return multiply


@functools.cache
def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def _signed_product(weight: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    """The same numbers, by a product that takes signed rows: on a GPU with Triton our own, else torch's."""
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor] = plain_integer_product
    if weight.device.type == "cuda" and has_triton():
        from specdec_cli.lm.kernels.few_rows import integer_product

        multiply = integer_product
    return lambda rows: multiply(rows.sub(_ZERO_POINT).view(torch.int8), weight, scales)


def plain_integer_product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """torch's: rows [n, in] int8 times weight [out, in] int8, times scales [out]: float32 [n, out].

    What it takes no less of on a device is filled up with zeros.
    """
    (num_rows, num_inputs), num_outputs = rows.shape, len(weight)
    least_rows, multiple = _smallest(weight.device)
    columns = _filled(weight, -num_outputs % multiple, -num_inputs % multiple).t()
    padded = _filled(rows, max(least_rows - num_rows, 0), -num_inputs % multiple)
    return torch._int_mm(padded, columns)[:num_rows, :num_outputs] * scales


def _filled(matrix: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """A matrix with so many more rows and columns of zeros; the same one where it needs none."""
    return F.pad(matrix, (0, num_columns, 0, num_rows)) if num_rows or num_columns else matrix


def _smallest(device: torch.device) -> tuple[int, int]:
    """Rows that torch's integer product takes at least, and what its sides are multiples of: more with CUDA."""
    return (17, 8) if device.type == "cuda" else (1, 1)


def pack(weight: Tensor, bias: Tensor | None, kind: Kind) -> PackedLinear:
    """Pack a weight.

    Args:
        weight: [out, in], floating; the caller drops it, so that one copy stays.
        bias: [out], or None.
        kind: from `kind_for`.
    """
    assert kind != "bf16" or weight.dtype == torch.bfloat16, f"{weight.dtype} is not packed as {kind}"
    forms: dict[Kind, Callable[[Tensor, Tensor | None], PackedLinear]]
    forms = {"plain": PlainLinear, "bf16": OneDnnLinear, "int8": Int8Linear, "few rows": _few_rows}
    form = forms[kind]
    with torch.no_grad():
        return form(weight, bias)


def _few_rows(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Where there is Triton."""
    from specdec_cli.lm.kernels.few_rows import FewRowsLinear

    return FewRowsLinear(weight, bias)


def kind_for(dtype: torch.dtype, device: torch.device, quantize: str = "none") -> Kind:
    """What a model's linear layers become.

    Args:
        dtype: of its weights.
        device: where it runs.
        quantize: none or int8, as recipes say.
    """
    if quantize == "int8":
        return "int8"
    if device.type == "cuda":
        return "few rows" if dtype.itemsize == 2 and has_triton() else "plain"
    return "bf16" if dtype == torch.bfloat16 and missing("bf16") is None else "plain"


def kind_when(compiled: bool, dtype: torch.dtype, device: torch.device, quantize: str = "none") -> Kind:
    """As `kind_for`; what torch compiles for a CPU takes no packed layers, whose products it cannot look into."""
    return "plain" if compiled and device.type == "cpu" else kind_for(dtype, device, quantize)


@functools.cache
def has_triton() -> bool:
    """Whether our kernels for a GPU, in Triton, which comes with torch for CUDA, run here and are right."""
    return torch.cuda.is_available() and missing("few rows") is None


def kernels() -> dict[str, str]:
    """What transformers' forward multiplies weights with here, in words: bfloat16 and int8 on the CPU, any on a GPU."""
    plain = {"bf16": "torch's plain product", "int8": "torch's plain integer product, slow"}
    fast = {"bf16": "packed for oneDNN", "int8": "packed for oneDNN (VNNI)"}
    reasons: dict[str, str | None] = {"bf16": missing("bf16"), "int8": missing("int8")}
    names = {"bf16": "bfloat16", "int8": "int8"}
    found = {
        names[kind]: fast[kind] if reason is None else f"{plain[kind]}: {reason}" for kind, reason in reasons.items()
    }
    if torch.cuda.is_available():
        reason = missing("few rows")
        found["on the GPU"] = "our own, in Triton" if reason is None else f"torch's plain products: {reason}"
    return found


@functools.cache
def missing(kind: Kind) -> str | None:
    """Why a kind's fast kernel is not used on this machine; None where it was tried and is right."""
    if kind in ("bf16", "int8") and not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no oneDNN"
    try:
        with torch.no_grad():
            tries = {"plain": _never, "few rows": _try_triton, "bf16": _try_bfloat16, "int8": _try_vnni}
            return tries[kind]()
    except Exception as error:  # Triton compiles with the system's compiler, which fails in many ways
        return f"its operator failed: {first_line(error)}"


def _never() -> None:
    """The plain product is always there."""


def _try_triton() -> str | None:
    """On the GPU that is there, else in Triton's interpreter where that is asked for."""
    if find_spec("triton") is None:
        return "there is no Triton"
    from specdec_cli.lm.kernels.few_rows import multiply

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, weight = (torch.linspace(-1, 1, n * 256, device=device).sin().view(n, 256).half() for n in (5, 96))
    found, right = multiply(rows, weight, None), rows.float() @ weight.float().t()
    is_close = found.shape == right.shape and torch.allclose(found.float(), right, rtol=2e-2, atol=2e-2)
    return None if is_close else "its kernel computes something else"


def _try_bfloat16() -> str | None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor multiplies no bfloat16"
    rows, weight = (torch.linspace(-1, 1, n * 64).sin().view(n, 64).bfloat16() for n in (5, 96))
    found = OneDnnLinear(weight, None)(rows)
    right = rows.float() @ weight.float().t()
    is_close = found.shape == right.shape and torch.allclose(found.float(), right, rtol=2e-2, atol=2e-2)
    return None if is_close else "its operator computes something else"


def _try_vnni() -> str | None:
    # The largest numbers too: without VNNI, sums of two products overflow 16 bits.
    rows = torch.arange(4 * 64).view(4, 64).mul(37).remainder(255).add(1).to(torch.uint8)
    rows[0] = 255
    weight = torch.arange(96 * 64).view(96, 64).mul(29).remainder(255).sub(127).to(torch.int8)
    weight[0] = 127
    scales = torch.ones(96)
    found = _vnni_product(weight, scales)(rows)
    right = ((rows.long() - _ZERO_POINT) @ weight.long().t()).float()
    return None if torch.equal(found, right) else "its operator computes something else"
