"""Gated DeltaNet and Kimi's delta attention: Qwen3-Next, Qwen 3.5 and 4, OLMo Hybrid, Kimi-Linear.

Tested with transformers 5.17 to 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec_cli.lm.families.recurrences import delta_rule, no_state

if TYPE_CHECKING:
    from specdec_cli.lm.families.mixer import Mixer


def gated_delta_rule(
    mixer: Mixer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """`torch_chunk_gated_delta_rule`, `chunk_kimi_delta_attention`: query [1, n, heads, K], value [1, n, H, V]."""
    num_heads, dtype = value.shape[2], query.dtype
    store, order = mixer.next_states((num_heads, key.shape[3], value.shape[3]))
    query, key, value, g, beta = (order.turn(tensor[0].float()) for tensor in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (tensor * torch.rsqrt((tensor * tensor).sum(-1, keepdim=True) + 1e-6) for tensor in (query, key))
    query = query / query.shape[2] ** 0.5
    query, key = (tensor.repeat_interleave(num_heads // tensor.shape[1], 1) for tensor in (query, key))
    decay = g.exp() if g.dim() == 3 else g.exp()[..., None]
    output = delta_rule(order, store, decay, query, key, value, beta)
    return output[None].to(dtype), no_state(output)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
}
