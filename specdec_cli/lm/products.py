"""Products with a weight matrix, written into what is there: the form of the weight follows from its size and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_cli.lm.linear import Kind, missing, pack

# oneDNN's prepacked product has a fixed cost, and then 5 rows cost what one does; MKL's costs by the row. Matrices of
# models that fit a cache are too small for the first.
PACKED_BYTES = 4 * 2**20


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
        # A tied embedding is looked up as well: it stays in its one form.
        is_large = self._is_float and not keeps and weight.numel() * weight.element_size() >= PACKED_BYTES
        if kind == "plain" and is_large and missing("float32") is None:
            kind = "float32"
        self._linear = None if kind == "plain" else pack(weight, bias, kind)
        self._weight: Tensor | None = None
        if self._linear is None:
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
        assert self._weight is not None, "a product has a weight in one form at least"
        return torch.mm(x, self._weight) if self._bias is None else torch.addmm(self._bias, x, self._weight)
