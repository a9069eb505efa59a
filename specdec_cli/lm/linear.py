"""Linear layers whose weights are packed once, at load, for this machine's kernels: bfloat16 or int8."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

Kind = Literal["plain", "bf16", "int8"]


class PackedLinear(nn.Module):
    """A linear layer: y [..., out] = x [..., in] · weightᵀ + bias, in x's dtype.

    Args:
        num_inputs: in.
        num_outputs: out.
        num_bytes: what a product reads: the packed weight and its scales.
    """

    num_inputs: int
    num_outputs: int
    num_bytes: int


def pack(weight: Tensor, bias: Tensor | None, kind: Kind) -> PackedLinear:
    """Pack a weight [out, in]; the caller drops the original. (Signature fixed; the body comes in minutes: W2.)."""
    raise NotImplementedError
