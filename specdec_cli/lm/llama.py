"""A decoder of our own for the Llama shape: RMS norm, rotary positions, grouped heads, a gated MLP.

A small model's step is spent in dispatch, not in bytes, so everything here serves few operators: fused products, all
views of the work buffers made once per number of rows, keys and values of all layers in one tensor. The weights are
transformers' own, laid out anew (`llama_weights`). transformers' forward is the oracle; what is not known by name goes
through it.

Letters: n rows of a forward, H query heads, K key heads, G = H/K, D head size, I MLP width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_cli.lm.attention import MIN_ROWS
from specdec_cli.lm.cache import KEY_GRAIN, Layout, Span
from specdec_cli.lm.linear import Kind
from specdec_cli.lm.llama_weights import Norm, Shape, empty, take_layer
from specdec_cli.lm.products import Product

# Work buffers and masks are kept for forwards of up to so many rows; a prompt's chunks make their own.
MAX_KEPT_ROWS = 16


class _Workspace:
    """Buffers of a forward of n rows and the views on them that each layer uses."""

    def __init__(self, num_rows: int, shape: Shape) -> None:
        heads, key_heads, size = shape.num_heads, shape.num_key_heads, shape.head_size
        # Rows behind the last one fill up a product that needs MIN_ROWS; what is in them does not matter.
        padded = num_rows + MIN_ROWS
        self.hidden = torch.zeros(num_rows, shape.hidden_size, dtype=shape.activations)
        self.qkv = torch.zeros(num_rows, (heads + 2 * key_heads) * size, dtype=shape.activations)
        split = self.qkv.view(num_rows, -1, size)
        self.is_float = shape.activations == torch.float32
        self.unturned = split[:, : shape.num_turned]
        self.turned = self.unturned if self.is_float else torch.zeros(num_rows, shape.num_turned, size)
        self.complex = torch.view_as_complex(self.turned.view(num_rows, shape.num_turned, size // 2, 2))
        self.keys = self.turned[:, heads:].transpose(0, 1)[None]
        self.values = split[:, shape.num_turned :].transpose(0, 1)[None]
        self.key_values = split[:, heads:].transpose(0, 1)[None] if self.is_float else None
        self.queries_in = self.turned[:, :heads]
        # float32 queries of one group, or of one row, can be read where the product left them.
        self.moves_queries = shape.dtype != torch.float32 or (shape.num_groups > 1 and num_rows > 1)
        moved = torch.zeros(padded, heads, size, dtype=shape.dtype)
        self.queries_out = moved[:num_rows]
        self.queries = moved if self.moves_queries else self.queries_in
        self.attended = torch.zeros(num_rows, heads * size, dtype=shape.dtype)
        self.gate_up = torch.zeros(num_rows, 2 * shape.mlp_size, dtype=shape.activations)
        self.gate, self.up = self.gate_up.chunk(2, dim=-1)


class _Masks:
    """Causal masks as windows of one strip for each number of queries, so that none is built in a step.

    A strip's row i·G + g allows column c - origin <= i; moved to a query position p it is the mask of keys 0, 1, ...
    """

    def __init__(self, num_groups: int, dtype: torch.dtype) -> None:
        self._num_groups = num_groups
        self._dtype = dtype
        self._strips: dict[int, tuple[int, Tensor]] = {}

    def window(self, num_queries: int, position: int, num_keys: int) -> Tensor:
        """Mask [num_queries · G, num_keys] of queries at position, position + 1, ..."""
        if num_queries > MAX_KEPT_ROWS:
            return self._strip(num_queries, position, num_keys)
        origin, strip = self._strips.get(num_queries, (-1, None))
        if strip is None or position > origin or strip.shape[1] < origin - position + num_keys:
            origin = max(2 * position, 4 * KEY_GRAIN)
            strip = self._strip(num_queries, origin, origin + num_queries + 2 * KEY_GRAIN)
            self._strips[num_queries] = origin, strip
        return strip.narrow(1, origin - position, num_keys)

    def _strip(self, num_queries: int, origin: int, width: int) -> Tensor:
        row = torch.arange(num_queries).repeat_interleave(self._num_groups)[:, None]
        hidden = torch.arange(width)[None, :] - origin > row
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)


class LlamaDecoder:
    """Packed forwards [n tokens] over a cache of blocks.

    It takes the model's weights with it: the modules it has read are left with tensors on the meta device, which have
    shapes and no memory. Not for two threads at once.

    Args:
        model: a transformers model without an `obstacle`.
        kind: how the weights of linear layers are kept.
    """

    def __init__(self, model: Any, kind: Kind = "plain") -> None:
        config, inner = model.config, model.model
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._shape = Shape(
            config.num_attention_heads,
            config.num_key_value_heads,
            head_size,
            config.hidden_size,
            config.intermediate_size,
            model.dtype,
            # int8 products quantise float32; rounding to half precision before would only cost time.
            torch.float32 if kind == "int8" else model.dtype,
        )
        self._scale = head_size**-0.5
        self._rotary = inner.rotary_emb
        self._turns = torch.empty(0)
        self._masks = _Masks(self._shape.num_groups, model.dtype)
        self._workspaces: dict[int, _Workspace] = {}
        with torch.inference_mode():
            self._embedding = inner.embed_tokens.weight.detach()
            self._layers = [take_layer(layer, self._shape, kind) for layer in inner.layers]
            self._norm = Norm.of(inner.norm)
            is_tied = model.lm_head.weight is inner.embed_tokens.weight
            self._head = Product(model.lm_head.weight.detach(), None, kind, keeps=is_tied)
        empty(model.lm_head, inner.embed_tokens)
        self.vocab_size = self._embedding.shape[0]
        self.kv_bytes_per_token = (
            2 * len(self._layers) * self._shape.num_key_heads * head_size * self._embedding.element_size()
        )
        self.allocate(0)

    def allocate(self, num_slots: int) -> None:
        """Make the cache: room for `num_slots` tokens, all layers in one tensor [layers, 1, 2K, slots, D]."""
        shape, num_heads = self._shape, self._shape.num_key_heads
        # Zeros, because masked keys are read too, and nothing times NaN is NaN.
        with torch.inference_mode():
            self._cache = torch.zeros(
                len(self._layers), 1, 2 * num_heads, num_slots, shape.head_size, dtype=shape.dtype
            )
            self._keys, self._values = self._cache.narrow(2, 0, num_heads), self._cache.narrow(2, num_heads, num_heads)

    def forward(self, tokens: list[int], layout: Layout, wanted: list[int]) -> Tensor:
        """Logits [len(wanted), V] float32 of the tokens at the places `wanted`; keys and values go into the cache."""
        logits = torch.empty(max(len(wanted), 2 if layout.bitwise else 1), self.vocab_size)
        with torch.inference_mode():
            x = self._run(tokens, layout)
            if not wanted:
                return logits[:0]
            x = _rows_of(x, wanted, len(logits))
            self._head.into(self._norm.into(x, torch.empty_like(x, dtype=self._shape.activations)), logits)
        return logits[: len(wanted)]

    def _run(self, tokens: list[int], layout: Layout) -> Tensor:
        """The residual stream [n, hidden] float32 behind the last layer."""
        x: Tensor = self._embedding.index_select(0, torch.tensor(tokens)).float()
        num_rows = len(tokens)
        work = self._workspace(num_rows)
        turns = self._turns_at(layout)
        writes = self._writes(layout, work)
        attentions = [self._attention(span, layout, work) for span in layout.spans]
        # One sequence's attention output is the next product's input as it is.
        direct = len(attentions) == 1 and layout.spans[0].stop == num_rows
        for index, layer in enumerate(self._layers):
            layer.qkv.into(layer.input_norm.into(x, work.hidden), work.qkv)
            if not work.is_float:
                work.turned.copy_(work.unturned)
            if layer.head_norm is not None:
                layer.head_norm.into(work.turned, work.turned)
            work.complex.mul_(turns)
            if work.moves_queries:
                work.queries_out.copy_(work.queries_in)
            for write in writes:
                write(index)
            if direct:
                attended = attentions[0](index)
            else:
                attended = work.attended
                for span, attend in zip(layout.spans, attentions, strict=True):
                    attended[span.start : span.stop] = attend(index)
            layer.out.add_to(x, attended)
            layer.gate_up.into(layer.mlp_norm.into(x, work.hidden), work.gate_up)
            layer.down.add_to(x, F.silu(work.gate, inplace=True).mul_(work.up))
        return x

    def _workspace(self, num_rows: int) -> _Workspace:
        work = self._workspaces.get(num_rows)
        if work is None:
            work = _Workspace(num_rows, self._shape)
            if num_rows <= MAX_KEPT_ROWS:
                self._workspaces[num_rows] = work
        return work

    def _turns_at(self, layout: Layout) -> Tensor:
        """Rotations [n, 1, D/2] complex64 of the forward's positions; the table grows by doubling."""
        last = max(span.num_keys for span in layout.spans)
        if last > self._turns.shape[0]:
            positions = torch.arange(max(2 * last, 512))[None]
            cosines, sines = self._rotary(torch.empty(0), positions)
            half = self._shape.head_size // 2
            self._turns = torch.complex(cosines[0, :, None, :half], sines[0, :, None, :half])
        found: Tensor = self._turns.index_select(0, layout.positions[0])
        return found

    def _writes(self, layout: Layout, work: _Workspace) -> list[Callable[[int], object]]:
        """What stores a layer's new keys and values."""
        slots = layout.write_slots
        if slots is not None:
            keys, values = work.keys[:, :, : layout.num_written], work.values[:, :, : layout.num_written]
            return [
                lambda index: self._keys[index].index_copy_(2, slots, keys.to(self._cache.dtype)),
                lambda index: self._values[index].index_copy_(2, slots, values.to(self._cache.dtype)),
            ]
        writes = []
        for start, stop, slot in layout.pieces:
            parts = (
                [(self._cache, work.key_values)]
                if work.key_values is not None
                else [(self._keys, work.keys), (self._values, work.values)]
            )
            for store, new in parts:
                targets = store.narrow(3, slot, stop - start).unbind(0)
                writes.append(_copy(targets, new[:, :, start:stop]))
        return writes

    def _attention(self, span: Span, layout: Layout, work: _Workspace) -> Callable[[int], Tensor]:
        """What computes a span's attention [queries, H · D] in a layer."""
        groups, size = self._shape.num_groups, self._shape.head_size
        num_queries = span.stop - span.start
        # A sequence's own rows, and, where bits matter and they are too few, rows behind them that are thrown away.
        num_computed = max(num_queries, -(-MIN_ROWS // groups)) if layout.bitwise else num_queries
        queries = work.queries[span.start : span.start + num_computed]
        queries = queries.view(num_computed * groups, -1, size).transpose(0, 1)[None]
        position = span.position
        is_last = num_queries == 1 and span.num_keys == position + 1
        mask = None if is_last and not layout.bitwise else self._masks.window(num_computed, position, span.num_keys)
        keys, values = self._reads(span)
        scale, width = self._scale, self._shape.num_heads * size

        def attend(index: int) -> Tensor:
            found = F.scaled_dot_product_attention(queries, keys(index), values(index), attn_mask=mask, scale=scale)
            return found.transpose(1, 2).reshape(num_computed, width)[:num_queries]

        return attend

    def _reads(self, span: Span) -> tuple[Callable[[int], Tensor], Callable[[int], Tensor]]:
        """What gives a layer's keys and values [1, K, T, D]; views where they lie in one piece."""
        slots = span.slots
        if slots is not None:
            return (
                lambda index: self._keys[index].index_select(2, slots),
                lambda index: self._values[index].index_select(2, slots),
            )
        return (
            self._keys.narrow(3, span.first_slot, span.num_keys).unbind(0).__getitem__,
            self._values.narrow(3, span.first_slot, span.num_keys).unbind(0).__getitem__,
        )


def _copy(targets: tuple[Tensor, ...], source: Tensor) -> Callable[[int], object]:
    return lambda index: targets[index].copy_(source)


def _rows_of(x: Tensor, wanted: list[int], num_rows: int) -> Tensor:
    """The wanted rows of x; the first one again where they are too few."""
    if len(wanted) < num_rows:
        wanted = wanted + wanted[:1]
    if wanted[-1] - wanted[0] == len(wanted) - 1:
        return x if len(wanted) == x.shape[0] else x.narrow(0, wanted[0], len(wanted))
    return x.index_select(0, torch.tensor(wanted))
