"""Products with a weight matrix, written into what is there: the form of the weight follows from its size and dtype."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.linear import Kind, pack

# Measured on one Zen 4 core in float32: oneDNN's prepacked product costs some 10 µs however small it is, and then 5
# rows cost what one does; MKL's costs by the row (3072×1024, 1 and 5 rows: 0.83 and 2.0 ms, packed 0.79 and 0.71).
# Matrices of models that fit a cache are too small for it: keeping both forms of them made whole steps slower.
PACKED_BYTES = 4 * 2**20
_TYPICAL_ROWS = 5


class Product:
    """x [n, in] times a weight, plus its bias.

    Args:
        weight: [out, in]; the caller drops it, unless it stays in use (`keeps`).
        bias: [out], or None.
        kind: plain (the weight's own dtype), or one that `linear.pack` knows.
        keeps: the weight is somebody else's too (a tied embedding): no other copy of it in its own layout is made.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, kind: Kind = "plain", keeps: bool = False) -> None:
        self._bias = None if bias is None else bias.detach()
        self._is_float = weight.dtype == torch.float32
        self._linear = None if kind == "plain" else pack(weight, bias, kind)
        self._packed: Tensor | None = None
        self._weight: Tensor | None = None
        if self._linear is not None:
            return
        # A tied embedding is looked up as well: it stays in its one form.
        is_large = self._is_float and not keeps and weight.numel() * weight.element_size() >= PACKED_BYTES
        if is_large and can_pack_float32():
            self._packed = _pack_float32(weight)
        else:
            # Inputs outermost: one row reads such a matrix 10 to 30 % faster. Half precision as `doctor` tries it.
            self._weight = weight.t() if keeps or not self._is_float else weight.t().contiguous()

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        """The product in `out` [n, out]; of its dtype or float32."""
        if self._weight is None:
            return out.copy_(self._product(x))
        if out.dtype != x.dtype:
            return out.copy_(torch.mm(x, self._weight) if self._bias is None else self._product(x))
        if self._bias is None:
            return torch.mm(x, self._weight, out=out)
        return torch.addmm(self._bias, x, self._weight, out=out)

    def add_to(self, stream: Tensor, x: Tensor) -> Tensor:
        """Add the product to `stream` [n, out] in place."""
        if self._weight is None or not self._is_float:
            return stream.add_(self._product(x))
        return stream.addmm_(x, self._weight)

    def _product(self, x: Tensor) -> Tensor:
        if self._linear is not None:
            found: Tensor = self._linear(x)
            return found
        if self._packed is not None:
            return _packed_product(x, self._packed, self._bias)
        assert self._weight is not None, "a product has a weight in one form at least"
        return torch.mm(x, self._weight) if self._bias is None else torch.addmm(self._bias, x, self._weight)


def _pack_float32(weight: Tensor) -> Tensor:
    """The weight in oneDNN's own layout; there is no public way to keep one."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    return packed


def _packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    empty: list[Any] = []
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", empty, "")
    return found


@functools.cache
def can_pack_float32() -> bool:
    """Whether this torch has the private operators, and they compute what they should."""
    weight, x = (torch.linspace(-1, 1, n * 32).sin().view(n, 32) for n in (48, 5))
    try:
        with torch.inference_mode():
            found = _packed_product(x, _pack_float32(weight), None)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(found, x @ weight.t(), atol=1e-4)
