"""Attention that cannot be replaced through transformers' interface: Falcon, and before 5.24 CodeGen and GPT-J.

Tested with transformers 5.17 to 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from specdec_cli.lm.forward.joined import each_sequence
from specdec_cli.lm.kernels.replaced import calls, replace_in


def attend_each_sequence(model: Any) -> None:
    """Have attention that cannot be replaced see one sequence at a time: a row has the same bits in any company."""
    for module in model.modules():
        if hasattr(type(module), "_attn"):  # CodeGen, GPT-J
            module._attn = partial(_weightless, MethodType(type(module)._attn, module))
        elif calls(module, "scaled_dot_product_attention"):  # Falcon
            alone = F.scaled_dot_product_attention
            replace_in(module, {alone: partial(each_sequence, alone)})


def _weightless(attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
    def alone(*given: Tensor, attn_mask: Tensor) -> Tensor:
        attended: Tensor = attend(*given, attn_mask)[0]
        return attended

    return each_sequence(alone, query, key, value, mask), None
