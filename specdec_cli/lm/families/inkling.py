"""Inkling 2's short convolutions, whose weights depend on the token. Tested with transformers 5.23."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from specdec_cli.lm.families.recurrences import look_back

if TYPE_CHECKING:
    from specdec_cli.lm.families.mixer import Mixer


def dynamic_convolution(
    mixer: Mixer, module: Any, hidden_states: Tensor, dynamic_input: Tensor, *_: Any, **__: Any
) -> Tensor:
    """`Inkling2DynamicShortConvolution`: a short convolution whose weights depend on the token, the nearest first."""
    width, inputs = module.conv_kernel_size, hidden_states[0].float()
    dynamic = module.weight_proj(dynamic_input)[0].float().view(-1, module.num_heads, 1, width)
    weights = module.static_weight.float().T.view(module.num_heads, -1, width) + dynamic
    store, order = mixer.next_states(inputs.shape[1:], inputs.dtype, width - 1)
    windows = look_back(order, store, inputs, width).flip(1).transpose(1, 2)
    total: Tensor = (windows * weights.flatten(1, 2)).sum(2) + inputs
    return (total / math.sqrt(2 * width + 1))[None].to(hidden_states.dtype)


CLASSES = {"Inkling2DynamicShortConvolution": dynamic_convolution}
