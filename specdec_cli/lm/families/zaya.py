"""Zaya's compressed convolutional attention. Tested with transformers 5.17 to 5.24."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec_cli.lm.families.recurrences import look_back, shifted

if TYPE_CHECKING:
    from specdec_cli.lm.families.mixer import Mixer


def compressed_convolution(mixer: Mixer, module: Any, hidden_states: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`ZayaCCAProjection`: queries and keys through two short convolutions, half of each value one token late."""
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    queries, keys = module.q_proj(hidden_states), module.k_proj(hidden_states)
    inputs = torch.cat((queries, keys), -1)[0]
    store, order = mixer.next_states(inputs.shape[1:], inputs.dtype, module.conv_kernel_size)
    windows = look_back(order, store, inputs, module.conv_kernel_size + 1).transpose(1, 2)
    mixed = module.conv_qk_grouped(module.conv_qk_depthwise(windows)).transpose(1, 2).view(shape)
    num_groups = module.num_key_value_groups
    residual = (queries.view(shape) + keys.view(shape).repeat_interleave(num_groups, 2)) * 0.5
    query = mixed[:, :, : module.num_attention_heads] + residual
    key = mixed[:, :, module.num_attention_heads :] + residual.unflatten(2, (-1, num_groups)).mean(3)
    late = module.v_proj_delayed(shifted(mixer, hidden_states))
    return query, key, torch.cat((module.v_proj_current(hidden_states), late), -1).view(shape)


CLASSES = {"ZayaCCAProjection": compressed_convolution}
