"""The attention function that transformers calls: each row's queries against that row's keys in the block cache.

`registration` gives it to transformers, of which it knows nothing. Masks come from transformers' own mask functions,
evaluated at each row's positions, so sliding windows and their like mean here what they mean there. Queries that share
a key head are packed as rows of one product (grouped heads cost no copy of the keys). Where bits matter (bfloat16 and
float16 on a CPU) at least four rows go into every product and the number of keys follows from the query's position:
measured, the kernel then gives a row the same bits in any company. On a GPU a long piece of a prompt goes through
torch's causal kernel (FlashAttention), which needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_cli.lm.cache.cache import LayerStore
from specdec_cli.lm.cache.latents import ExpandedStore
from specdec_cli.lm.cache.layout import Layout, Span

MIN_ROWS = 4
PROMPT_QUERIES = 128
"""From so many queries of a sequence on a mask costs more than the kernel that needs none."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class RowMasks:
    """Additive masks of one forward for one kind of layer (full, sliding), built when first asked for."""

    def __init__(self, layout: Layout, allowed: MaskFunction) -> None:
        self.layout = layout
        self._allowed = allowed
        self._masks: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._all: Tensor | None = None

    def is_causal(self, span: Span) -> bool:
        """Whether a span's queries are the last of its positions, and each sees all positions up to its own."""
        ends = span.position + span.stop - span.start
        return self._allowed is causal and ends == span.num_keys

    def bias(self, index: int, num_groups: int, dtype: torch.dtype) -> Tensor:
        """Mask of a span, [num_groups × queries, T] with 0 where a query may look and -inf elsewhere."""
        mask = self._masks.get((index, num_groups, dtype))
        if mask is None:
            mask = self._build(self.layout.spans[index], num_groups, dtype)
            self._masks[index, num_groups, dtype] = mask
        return mask

    def allowed(self) -> Tensor:
        """Whether each query of a recorded forward may look at each place of its sequence [n, T] bool."""
        if self._all is None:
            slots, nodes = self.layout.slots, self.layout.nodes
            assert slots is not None, "a recorded forward is given slots"
            keys = torch.arange(slots.shape[1], device=slots.device) if nodes is None else nodes.key_positions[:, None]
            zero = slots.new_zeros(())
            allowed = self._allowed(zero, zero, self.layout.position_ids.view(len(slots), -1, 1), keys)
            self._all = (allowed if nodes is None else allowed & nodes.is_seen).view(-1, slots.shape[1])
        return self._all

    def _build(self, span: Span, num_groups: int, dtype: torch.dtype) -> Tensor:
        allowed = self._allowed_of(span, num_groups)
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)
        return mask.repeat(num_groups, 1) if num_groups > 1 else mask

    def _allowed_of(self, span: Span, num_groups: int) -> Tensor:
        """Whether a span's queries, and those that are added to them, may look at its keys [queries, T] bool."""
        if self.layout.slots is not None:
            return self.allowed()[span.start : span.stop]
        positions = self.layout.position_ids[0, span.start : span.stop]
        missing = _missing_queries(span, num_groups, self.layout)
        if missing:
            positions = torch.cat((positions, positions[-1:].expand(missing)))
        key_positions = self.layout.key_positions[: span.num_keys]
        zero = key_positions.new_zeros(())
        return self._allowed(zero, zero, positions[:, None], key_positions[None, :])

    def block_diagonal(self, dtype: torch.dtype) -> Tensor:
        """One mask [1, 1, n, sum of T] for all rows at once, for models that are handed joined keys."""
        spans = self.layout.spans
        # The smallest number instead of -inf: some of these models add masks before they scale.
        lowest = torch.finfo(dtype).min
        num_keys = sum(span.num_keys for span in spans)
        joined = torch.full((spans[-1].stop, num_keys), lowest, dtype=dtype, device=self.layout.device)
        column = 0
        for index, span in enumerate(spans):
            block = joined[span.start : span.stop, column : column + span.num_keys]
            block.copy_(self.bias(index, 1, dtype)[: len(block)].clamp(min=lowest))
            column += span.num_keys
        return joined[None, None]


def _missing_queries(span: Span, num_groups: int, layout: Layout) -> int:
    """How many queries to add so that a product has MIN_ROWS rows."""
    if not layout.is_bitwise:
        return 0
    return max(0, -(-MIN_ROWS // num_groups) - (span.stop - span.start))


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: LayerStore | ExpandedStore,
    value: LayerStore | ExpandedStore,
    attention_mask: RowMasks,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed forward.

    Args:
        module: transformers' attention module (unused; part of the interface).
        query: [1, H, n, D], all rows' queries.
        key: the layer's store, from `BlockCache.update`.
        value: the same store.
        attention_mask: of the layout.
        scaling: factor of the scores; None is D^-0.5.
        softcap: scores become softcap·tanh(scores / softcap) (Gemma 2).
        s_aux: one sink logit per head [H], which takes probability and gives nothing (gpt-oss).
        position_bias: must be None: no family with a learned bias has been tried.

    Returns:
        [1, n, H, D_v], and no weights.
    """
    assert isinstance(key, LayerStore | ExpandedStore), "keys did not come from the block cache"
    assert isinstance(attention_mask, RowMasks), "the mask did not come from transformers' mask interface"
    assert position_bias is None, "attention with a position bias is not supported"
    plain = softcap is None and s_aux is None
    layout = attention_mask.layout
    if layout.kernels is not None:
        assert isinstance(key, LayerStore), "kernels read keys as they are stored"
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        stored = key.keys, key.values, layout.slots
        return layout.kernels.attend(query, *stored, attention_mask.allowed(), scale, softcap, s_aux), None
    num_heads = query.shape[1]
    outputs = []
    for index, span in enumerate(layout.spans):
        keys, values = key.read(span)
        num_groups = num_heads // keys.shape[1]
        queries = query if len(layout.spans) == 1 else query[:, :, span.start : span.stop]
        if plain and _has_causal_kernel(queries) and attention_mask.is_causal(span):
            outputs.append(_attend_causally(queries, keys, values, scaling).transpose(1, 2))
            continue
        missing = _missing_queries(span, num_groups, layout)
        if missing:
            queries = torch.cat((queries, queries[:, :, -1:].expand(-1, -1, missing, -1)), 2)
        num_queries = queries.shape[2]
        if num_groups > 1:
            queries = queries.reshape(1, -1, num_groups * num_queries, queries.shape[3])
        mask = attention_mask.bias(index, num_groups, query.dtype)
        if plain:
            output = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
        else:
            output = attend_by_hand(queries, keys, values, mask, scaling, softcap, s_aux)
        if num_groups > 1:
            output = output.reshape(1, num_heads, num_queries, values.shape[3])
        output = output.transpose(1, 2)
        outputs.append(output[:, : num_queries - missing] if missing else output)
    # In one piece, as transformers' own attention functions return it: some families view it (AFMoE).
    return (outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs, 1)), None


def _has_causal_kernel(queries: Tensor) -> bool:
    """Whether torch has a causal kernel that is worth it for the queries of one sequence."""
    return queries.is_cuda and queries.dtype.itemsize == 2 and queries.shape[2] >= PROMPT_QUERIES


def _attend_causally(queries: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """Attention of a sequence's last queries [1, H, n, D] to its keys [1, K, T, D] up to their own; [1, H, n, D_v]."""
    from torch.nn.attention.bias import causal_lower_right  # which imports torch's compiler: two seconds

    mask: Any = causal_lower_right(queries.shape[2], keys.shape[2])
    is_grouped = queries.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=is_grouped)


def attend_by_hand(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention without the fused kernel: soft-capped scores and sinks. Shapes as in `attend`, heads packed."""
    scores = torch.matmul(queries, keys.transpose(2, 3)) * (queries.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is None:
        weights = scores.softmax(-1, dtype=torch.float32)
    else:
        num_heads = keys.shape[1]
        num_queries = queries.shape[2] * num_heads // sinks.numel()
        column = sinks.reshape(1, num_heads, -1, 1).expand(1, num_heads, -1, num_queries)
        joined = torch.cat((scores, column.reshape(1, num_heads, -1, 1).to(scores.dtype)), -1)
        weights = joined.softmax(-1, dtype=torch.float32)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)


def causal(batch_index: Tensor, head_index: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """A query sees its own and earlier positions."""
    return key_positions <= query_positions
