"""Stateful layers of transformers that write their recurrence into their own forward, instead of calling a function.

Each function here computes what such a layer's forward does, over the states that the block cache keeps.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_cli.lm.cache.cache import BlockCache
from specdec_cli.lm.state.recurrences import convolve, linear, look_back, matrix_memory, weighted_values

if TYPE_CHECKING:
    from specdec_cli.lm.state.mixers import Mixer


def recurrent_gemma(mixer: Mixer, module: Any, input_states: Tensor, position_ids: Tensor, **_: Any) -> Any:
    """`RecurrentGemmaRecurrentBlock`: a short convolution, then a real-gated linear recurrent unit (RG-LRU)."""
    convolution, unit = module.conv_1d, module.rg_lru
    inputs = module.linear_x(input_states)[0]
    weight = convolution.weight[:, 0]
    store, order = mixer.next_states(inputs.shape[1:], inputs.dtype, weight.shape[1] - 1)
    convolved = convolve(order, store, inputs, weight, convolution.bias).to(inputs.dtype)

    def scan(hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **_: Any) -> tuple[Tensor, None]:
        store, order = mixer.next_states(hidden_states.shape[2:])
        decay, update = order.turn((recurrent_gate * ~reset)[0].float()), order.turn(hidden_states[0].float())
        output = linear(order, store, decay, lambda rows: update[rows], lambda states, _: states)
        return output[None].to(hidden_states.dtype), None

    unit._rnn_scan = scan
    try:
        hidden_states = unit(convolved[None], position_ids)
    finally:
        del unit._rnn_scan
    return module.linear_out(hidden_states * module.act_fn(module.linear_y(input_states))), None


def lightning_attention(mixer: Mixer, module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    """`MiniMaxLightningAttention`: linear attention whose keys fade at one rate for each head."""
    num_heads, size = module.num_attention_heads, module.head_dim
    store, order = mixer.next_states((num_heads, size, size))
    states = module.act_fn(module.qkv_proj(hidden_states))[0].view(-1, num_heads, 3 * size)
    query, key, value = (order.turn(one.float()) for one in states.split(size, 2))
    decay = torch.exp(-module.slope_rate.float()).expand(len(query), -1, -1, -1)
    output = linear(
        order,
        store,
        decay,
        lambda rows: key[rows, ..., None] * value[rows, :, None],
        lambda kept, rows: (kept * query[rows, ..., None]).sum(2),
    )
    normed = module.norm(output.flatten(1)[None].to(hidden_states.dtype))
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * normed), None


def time_mix(mixer: Mixer, module: Any, hidden: Tensor, state: BlockCache, **_: Any) -> Any:
    """`RwkvSelfAttention`: values weighted by exponentials of keys, which fade at a rate of each channel."""
    before = _shifted(mixer, hidden)
    key, value, receptance = (
        layer(hidden * share + before * (1 - share))
        for layer, share in (
            (module.key, module.time_mix_key),
            (module.value, module.time_mix_value),
            (module.receptance, module.time_mix_receptance),
        )
    )
    store, order = mixer.next_states((3, key.shape[2]))
    keys, values = (order.turn(one[0].float()) for one in (key, value))
    decay = -torch.exp(module.time_decay.float())
    output = weighted_values(order, store, keys, values, decay, module.time_first.float())
    return module.output(torch.sigmoid(receptance) * output[None].to(key.dtype)), state


def channel_mix(mixer: Mixer, module: Any, hidden: Tensor, state: BlockCache, **_: Any) -> Any:
    """`RwkvFeedForward`: a feed-forward layer that reads the token before, too."""
    before = _shifted(mixer, hidden)
    key, receptance = (
        layer(hidden * share + before * (1 - share))
        for layer, share in (
            (module.key, module.time_mix_key),
            (module.receptance, module.time_mix_receptance),
        )
    )
    return torch.sigmoid(receptance) * module.value(torch.square(torch.relu(key))), state


def mlstm(mixer: Mixer, module: Any, x: Tensor, *_: Any) -> Any:
    """`xLSTMLayer`: its backend's recurrence, token by token."""
    backend = module.mlstm_backend

    def scan(query: Tensor, key: Tensor, value: Tensor, igate: Tensor, fgate: Tensor, **_: Any) -> tuple[Tensor, None]:
        num_heads, size = query.shape[1], query.shape[3]
        store, order = mixer.next_states((num_heads, size, value.shape[3] + 2))
        turned = (order.turn(one[0].transpose(0, 1).float()) for one in (query, key, value, igate, fgate))
        queries, keys, values, inputs, forgets = turned
        gates = inputs, F.logsigmoid(forgets)
        output = matrix_memory(order, store, queries * size**-0.5, keys, values, gates, module.config.eps)
        return output.transpose(0, 1)[None].to(query.dtype), None

    backend.forward = scan
    try:
        return mixer.own(x)
    finally:
        del backend.forward


def ngrams(mixer: Mixer, module: Any, input_ids: Tensor, *_: Any) -> Tensor:
    """`Qwen4ExpTextNGramEmbedding`: embeddings of the last tokens together; before a text, all of them end one."""
    store, order = mixer.next_states((), torch.int64, module.context_len)
    windows = look_back(order, store, input_ids[0] - module.eos_token_id, module.ngram_size) + module.eos_token_id
    found: Tensor = mixer.own(windows, None)[:, -1]
    return found[None]


def ngram_layer(mixer: Mixer, module: Any, *given: Any, **named: Any) -> Any:
    """`Qwen4ExpTextPLELayer`: a convolution of every third input, as one with zeros between its weights."""
    weight, dilation = module.conv1d.weight[:, 0], module.conv1d.dilation[0]
    spread = weight.new_zeros(len(weight), (weight.shape[1] - 1) * dilation + 1)
    spread[:, ::dilation] = weight

    def convolved(hidden_states: Tensor, _: Any) -> Tensor:
        store, order = mixer.next_states(hidden_states.shape[2:], hidden_states.dtype, spread.shape[1] - 1)
        return F.silu(convolve(order, store, hidden_states[0], spread, None).to(hidden_states.dtype))[None]

    module._short_conv = convolved
    try:
        return mixer.own(*given, **named)
    finally:
        del module._short_conv


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
    late = module.v_proj_delayed(_shifted(mixer, hidden_states))
    return query, key, torch.cat((module.v_proj_current(hidden_states), late), -1).view(shape)


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


def _shifted(mixer: Mixer, hidden: Tensor) -> Tensor:
    """Hidden states [1, n, hidden] of each token's predecessor; zeros before a text."""
    inputs = hidden[0]
    store, order = mixer.next_states(inputs.shape[1:], inputs.dtype)
    last = torch.tensor([1.0, 0.0], device=inputs.device).expand(inputs.shape[1], 2)
    return convolve(order, store, inputs, last, None).to(inputs.dtype)[None]


INLINE: dict[str, Callable[..., Any]] = {
    "RecurrentGemmaRecurrentBlock": recurrent_gemma,
    "MiniMaxLightningAttention": lightning_attention,
    "RwkvSelfAttention": time_mix,
    "Qwen4ExpTextNGramEmbedding": ngrams,
    "Qwen4ExpTextPLELayer": ngram_layer,
    "RwkvFeedForward": channel_mix,
    "Inkling2DynamicShortConvolution": dynamic_convolution,
    "ZayaCCAProjection": compressed_convolution,
    "xLSTMLayer": mlstm,
}
"""Forwards of stateful layers, by the names of their classes."""


def prepare(model: Any) -> None:
    """Settle what a family's forward would do itself: RWKV scales weights down in place, xLSTM cuts long prompts."""
    for module in model.modules():
        if type(module).__name__ == "xLSTMModel":
            module.config.max_inference_chunksize = sys.maxsize
        if type(module).__name__ == "RwkvModel" and not module.training:
            module._rescale_layers()
