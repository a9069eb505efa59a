"""Attention over the joined keys of all rows, for families that compute with keys, values or masks before they attend.

Differential attention splits the values (DiffLlama), a dynamic mask is made of them (Doge), an indexer chooses among
the keys (DeepSeek V3.2), a bias depends on their distance (Inkling). There the cache returns keys and values of all
rows in one piece, and the mask is block-diagonal: a query sees keys of its own row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.cache.cache import running_layout
from specdec_cli.lm.forward.attention import MIN_ROWS, attend_by_hand


def attend_joined(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    sinks: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed forward over joined keys.

    Args:
        module: transformers' attention module (unused; part of the interface).
        query: [1, H, n, D], all rows' queries.
        key: joined [1, heads, T, D].
        value: joined [1, heads, T, D_v].
        attention_mask: additive [1, 1 or H, n, T].
        scaling: factor of the scores; None is D^-0.5.
        softcap: scores become softcap·tanh(scores / softcap).
        s_aux: one sink logit per head [H].
        position_bias: added to the scores [1, H, n, T].
        indices: the keys that an indexer chose for each query [1, n, topk]; None leaves all.
        sinks: one sink logit per head and query [1, H, n, 1].

    Returns:
        [1, n, H, D_v], and no weights.
    """
    if position_bias is not None:
        attention_mask = attention_mask + position_bias
    if indices is not None:
        is_chosen = torch.zeros(1, 1, *attention_mask.shape[-2:], dtype=torch.bool, device=query.device)
        is_chosen.scatter_(-1, indices.long().unsqueeze(1), value=True)
        attention_mask = attention_mask.masked_fill(~is_chosen, torch.finfo(attention_mask.dtype).min)
    num_groups = query.shape[1] // key.shape[1]
    if num_groups > 1:
        key, value = (states.repeat_interleave(num_groups, 1) for states in (key, value))
    if sinks is not None:  # which go with the queries wherever they are taken apart
        query = torch.cat((query, sinks.to(query.dtype)), 3)

    def attend(queries: Tensor, keys: Tensor, values: Tensor, *, attn_mask: Tensor) -> Tensor:
        size = keys.shape[3]
        own = s_aux if sinks is None else queries[..., size:]
        return attend_by_hand(queries[..., :size], keys, values, attn_mask, scaling, softcap, own)

    layout = running_layout()
    if layout is not None and layout.is_bitwise:
        output = each_sequence(attend, query, key, value, attention_mask)
    else:
        output = attend(query, key, value, attn_mask=attention_mask)
    return output.transpose(1, 2).contiguous(), None


def each_sequence(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **named: Any
) -> Tensor:
    """Attention of joined rows, sequence by sequence.

    Args:
        attend: torch's attention or one like it; four queries or more take the same kernel.
        query: [1, H, n, D].
        key: joined [1, heads, T, D].
        value: joined [1, heads, T, D_v].
        attn_mask: additive [1, 1 or H, n, T].
        named: what else `attend` takes.

    Returns:
        [1, H, n, D_v].
    """
    layout = running_layout()
    assert layout is not None, "joined keys come from the block cache"
    outputs, first = [], 0
    for span in layout.spans:
        queries, mask = query[:, :, span.start : span.stop], attn_mask[:, :, span.start : span.stop]
        count, last = span.stop - span.start, first + span.num_keys
        rows = torch.arange(max(count, MIN_ROWS)).clamp(max=count - 1)
        pieces = queries[:, :, rows], key[:, :, first:last], value[:, :, first:last]
        outputs.append(attend(*pieces, attn_mask=mask[:, :, rows, first:last], **named)[:, :, :count])
        first = last
    return torch.cat(outputs, 2)
