"""Products with a weight matrix, written into what is there: the form of the weight follows from its size and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_cli.lm.linear import Kind, missing, pack

# oneDNN's prepacked product has a fixed cost of some 10 µs, and then 5 rows cost little more than one; MKL's costs by
# the row. A large float32 matrix takes the first, a small one the second, and one between them has both forms.
PACKED_BYTES = 4 * 2**20
BOTH_FORMS_BYTES = 2**19
MANY_ROWS = 3


class Product:
    """x [n, in] times a weight, plus its bias.

    Args:
        weight: [out, in]; the caller drops it, unless it stays in use (`keeps`).
        bias: [out], or None.
        kind: plain (the weight's own dtype), or one that `linear.pack` knows.
        keeps: the weight is somebody else's too (a tied embedding): a large one stays in the form it has.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, kind: Kind = "plain", keeps: bool = False) -> None:
        self._bias = None if bias is None else bias.detach()
        self._is_float = weight.dtype == torch.float32
        num_bytes = weight.numel() * weight.element_size()
        is_large = num_bytes >= PACKED_BYTES
        packs = self._is_float and num_bytes >= BOTH_FORMS_BYTES and not (keeps and is_large)
        if kind == "plain" and packs and missing("float32") is None:
            kind = "float32"
        self._linear = None if kind == "plain" else pack(weight, bias, kind)
        self._weight: Tensor | None = None
        if kind == "plain" or (kind == "float32" and not is_large):
            # Inputs outermost: one row reads such a matrix 10 to 30 % faster. Half precision as `doctor` tries it.
            moves = self._is_float and not (keeps and is_large)
            self._weight = weight.t().contiguous() if moves else weight.t()

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        """The product in `out` [n, out]; of its dtype or float32."""
        weight = self._weight_for(x)
        if weight is None or out.dtype != x.dtype:
            return out.copy_(self._product(x, weight))
        if self._bias is None:
            return torch.mm(x, weight, out=out)
        return torch.addmm(self._bias, x, weight, out=out)

    def add_to(self, stream: Tensor, x: Tensor) -> Tensor:
        """Add the product to `stream` [n, out] in place."""
        weight = self._weight_for(x)
        if weight is None or not self._is_float:
            return stream.add_(self._product(x, weight))
        return stream.addmm_(x, weight)

    def _weight_for(self, x: Tensor) -> Tensor | None:
        """The weight [in, out] that multiplies x; None is the packed one."""
        return None if self._linear is not None and x.shape[0] >= MANY_ROWS else self._weight

    def _product(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            assert self._linear is not None, "a product has a weight in one form at least"
            found: Tensor = self._linear(x)
            return found
        return torch.mm(x, weight) if self._bias is None else torch.addmm(self._bias, x, weight)
