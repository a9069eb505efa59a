"""Products and gates of a model's own classes on a CPU, the same in any company: routers, experts, recurrent layers.

In bfloat16 and float16 a row must get the same bits in any company, as from packed layers. A product takes another
kernel for one row than for several, and in float32, in which many routers compute, for two and three. A sigmoid of
the numbers that fill no vector at a tensor's end has other bits than of those before, so rows are filled up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec_cli.lm.kernels.kinds import can_pack
from specdec_cli.lm.kernels.linear import onednn_product
from specdec_cli.lm.kernels.replaced import calls, replace_in

_LEAST_ROWS = 2
_VECTORS = 64  # numbers that torch takes at once, at most


def keep_bits(model: nn.Module) -> None:
    """Make what a model's own classes compute the same in any company; its linear layers are packed for that."""
    for module in model.modules():
        if not isinstance(module, nn.Linear) and calls(module, "linear", *_NAMES):
            replace_in(module, {F.linear: steady_linear} | _IN_WHOLE_VECTORS)


def steady_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product of rows [..., in] with a weight [out, in], as `torch.nn.functional.linear` has it."""
    if input.dtype == torch.float32 and can_pack(torch.float32):
        return onednn_product(input, weight, bias, len(weight))
    rows = input.reshape(-1, input.shape[-1])
    missing = max(0, _LEAST_ROWS - len(rows))
    output = F.linear(F.pad(rows, (0, 0, 0, missing)) if missing else rows, weight, bias)
    return output[: len(rows)].view(*input.shape[:-1], len(weight))


def in_whole_vectors(function: Callable[..., Tensor], input: Tensor, *given: Any, **named: Any) -> Tensor:
    """A function of each number of rows [..., n]."""
    missing = -input.shape[-1] % _VECTORS
    if not missing:
        return function(input, *given, **named)
    return function(F.pad(input, (0, missing)), *given, **named)[..., : input.shape[-1]].contiguous()


_NAMES = ("softplus", "sigmoid", "silu")
_IN_WHOLE_VECTORS: dict[Callable[..., Any], Callable[..., Any]] = {
    function: partial(in_whole_vectors, function)
    for function in (F.softplus, F.silu, F.sigmoid, torch.sigmoid, Tensor.sigmoid)
}
