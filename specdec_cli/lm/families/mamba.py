"""Mamba, Mamba-2 and the short convolution before them, which hybrids of many families have, too.

Their modules call these functions by name, in Bamba, Falcon-H1, Granite 4 H, Jamba, LFM2, Nemotron-H, Zamba and others.
Tested with transformers 5.17 to 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from specdec_cli.lm.families.recurrences import convolve, linear, no_state
from specdec_cli.lm.kernels.own_products import in_whole_vectors

if TYPE_CHECKING:
    from specdec_cli.lm.families.mixer import Mixer


def convolution(
    mixer: Mixer,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """`causal_conv1d_fn`: hidden states [1, channels, n], weight [channels, width]."""
    inputs = hidden_states[0].t()
    store, order = mixer.next_states(inputs.shape[1:], hidden_states.dtype, weight.shape[1] - 1)
    output = convolve(order, store, inputs, weight, bias).to(weight.dtype)
    if activation is not None:
        output = ACT2FN[activation](output)
    return output.to(hidden_states.dtype).t()[None]


def mamba2_scan(
    mixer: Mixer,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """`mamba2_chunk_scan`: hidden states [1, n, H, P], dt [1, n, H], A [H], B and C [1, n, groups, N], D [H]."""
    num_heads, head_dim = hidden_states.shape[2:]
    store, order = mixer.next_states((num_heads, head_dim, B.shape[3]))
    x = hidden_states[0].float()
    times = order.turn(_times(dt[0], dt_bias, dt_softplus).clamp(*dt_limit).float())
    decay = torch.exp(A.float() * times)[..., None, None]
    scaled = order.turn(x) * times[..., None]
    keys, queries = (
        order.turn(tensor[0].float()).repeat_interleave(num_heads // tensor.shape[2], 1)[:, :, None]
        for tensor in (B, C)
    )
    output = linear(
        order,
        store,
        decay,
        lambda rows: scaled[rows, ..., None] * keys[rows],
        lambda states, rows: (states * queries[rows]).sum(3),
    )
    return (output if D is None else output + D.float()[:, None] * x)[None], no_state(output)


def mamba_scan(
    mixer: Mixer,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """`mamba_selective_scan`: hidden states, dt and z [1, channels, n], A [channels, N], B and C [1, N, n]."""
    x = hidden_states[0].t().float()
    store, order = mixer.next_states((x.shape[1], A.shape[1]))
    times = order.turn(_times(dt[0].t(), delta_bias, delta_softplus).float())
    keys, queries = (order.turn(tensor[0].t().float())[:, None] for tensor in (B, C))
    scaled = order.turn(x) * times
    output = linear(
        order,
        store,
        torch.exp(A.float() * times[..., None]),
        lambda rows: scaled[rows, ..., None] * keys[rows],
        lambda states, rows: (states * queries[rows]).sum(2),
    )
    if D is not None:
        output = output + D.float() * x
    if z is not None:
        output = output * in_whole_vectors(F.silu, z[0].t().float())
    return output.t()[None], no_state(output)


def _times(dt: Tensor, bias: Tensor | None, is_soft: bool) -> Tensor:
    """Step sizes [n, channels], computed in their own dtype as transformers does."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return in_whole_vectors(F.softplus, dt) if is_soft else dt


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "mamba2_chunk_scan": mamba2_scan,
    "mamba_selective_scan": mamba_scan,
}
