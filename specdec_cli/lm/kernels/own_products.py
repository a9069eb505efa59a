"""Products that classes of a model's own compute with their weights: mixtures' routers, and experts one by one.

In bfloat16 and float16 on a CPU such a product must give a row the same bits in any company, as packed layers do. One
row takes another kernel than several, and in float32, in which many routers compute, so do two and three.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec_cli.lm.kernels.kinds import can_pack
from specdec_cli.lm.kernels.linear import onednn_product
from specdec_cli.lm.kernels.replaced import calls, replace_in

_LEAST_ROWS = 2


def keep_bits(model: nn.Module) -> None:
    """Make the products of a model's own classes the same in any company; its linear layers are packed for that."""
    for module in model.modules():
        if not isinstance(module, nn.Linear) and calls(module, "linear"):
            replace_in(module, {F.linear: steady_linear})


def steady_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product of rows [..., in] with a weight [out, in], as `torch.nn.functional.linear` has it."""
    if input.dtype == torch.float32 and can_pack(torch.float32):
        return onednn_product(input, weight, bias, len(weight))
    rows = input.reshape(-1, input.shape[-1])
    missing = max(0, _LEAST_ROWS - len(rows))
    found = F.linear(F.pad(rows, (0, 0, 0, missing)) if missing else rows, weight, bias)
    return found[: len(rows)].view(*input.shape[:-1], len(weight))
