"""One span's part of a block cache, in the form of transformers' cache of one sequence.

Some attentions count blocks of keys from a sequence's beginning: they choose blocks (MiniMax-M3, Qwen4), or compress
them and attend to the results (DeepSeek V4). Such a module runs once for each span. What it keeps lies in the block
cache, all of it by token: an entry that is compressed of several tokens belongs to the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.cache.cache import BlockCache, LayerStore, Place
from specdec_cli.lm.cache.layout import Layout, Span


@dataclass(frozen=True, slots=True)
class SpanCache:
    """The cache that an attention module gets for one span.

    Args:
        cache: of all sequences.
        span: the written queries of one sequence, and the keys up to the last of them.
        part: the layout of these queries alone.
        module: that attends.
    """

    cache: BlockCache
    span: Span
    part: Layout
    module: Any

    @property
    def layers(self) -> SpanCache:
        """Its layers, by their indices: itself."""
        return self

    def __getitem__(self, layer_idx: int) -> SpanLayer:
        """One layer of it."""
        return SpanLayer(self, layer_idx)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return all that the span reads. Values that are the keys are stored once."""
        if key_states is value_states:
            keys = self.file(layer_idx, key_states, _nothing_beside(key_states))[0]
            return keys, keys
        return self.file(layer_idx, key_states, value_states)

    def update_indexer(self, key_states: Tensor, layer_idx: int) -> Tensor:
        """Store the keys by which a layer's indexer chooses [1, n, dim]; return all [1, T, dim]."""
        return self[layer_idx].update_index(key_states[:, None])[:, 0]

    def file(self, place: Place, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Store new states [1, heads, n, dim] at a place; return all that the span reads."""
        return self.cache.file(place, key_states, value_states, self.part).read(self.span)

    def slots(self, positions: slice) -> Tensor:
        """Slots of some of the span's keys [m] int64."""
        span = self.span
        if span.slots is not None:
            return span.slots[: span.num_keys][positions]
        device = self.part.device
        return span.first_slot + torch.arange(span.num_keys, device=device)[positions]


@dataclass(frozen=True, slots=True)
class SpanLayer:
    """Keys and entries that an indexer or a compressor keeps of one layer."""

    cache: SpanCache
    index: int

    def update_index(self, key_states: Tensor) -> Tensor:
        """Store the keys by which an indexer chooses blocks [1, 1, n, dim]; return all [1, 1, T, dim]."""
        return self.cache.file(("indexer", self.index), key_states, _nothing_beside(key_states))[0]

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """Store what tokens give to their window's entry [1, n, dim].

        Args:
            name: `compressor`, or `indexer`.
            kv: what is compressed.
            gate: its weights.

        Returns:
            Both of all tokens of the windows that end among the new ones [1, m × rate, dim], and the first one's
            position.
        """
        new = self._new_windows(name)
        self.cache.file(self._inputs(name), kv[:, None], gate[:, None])
        chunk_kv, chunk_gate = self._read_inputs(name, new)
        return chunk_kv, chunk_gate, new.start

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """The first half of what the window before the new ones gave [1, rate, head_dim]; None before a text."""
        first, rate = self._new_windows(name).start, self._compressor(name).compress_rate
        if not first:
            return None, None
        kv, gate = self._read_inputs(name, slice(first - rate, first))
        gate = gate + self._compressor(name).position_bias
        return kv[..., :head_dim], gate[..., :head_dim]

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Store entries of windows that ended [1, m, dim]; return those of all windows so far."""
        new, rate = self._new_windows(name), self._compressor(name).compress_rate
        entries = compressed[:, None]
        store = self.cache.cache.store_at((f"{name} entries", self.index), entries, _nothing_beside(entries))
        if compressed.shape[1]:
            store.keys.index_copy_(2, self.cache.slots(slice(new.start + rate - 1, new.stop, rate)), entries)
        return store.keys.index_select(2, self.cache.slots(slice(rate - 1, None, rate)))[:, 0]

    def _compressor(self, name: str) -> Any:
        compressor = self.cache.module.compressor
        return compressor if name == "compressor" else compressor.indexer

    def _new_windows(self, name: str) -> slice:
        """Positions of the windows that end among the new tokens."""
        span, rate = self.cache.span, self._compressor(name).compress_rate
        return slice(span.position // rate * rate, span.num_keys // rate * rate)

    def _inputs(self, name: str) -> Place:
        return f"{name} inputs", self.index

    def _read_inputs(self, name: str, positions: slice) -> tuple[Tensor, Tensor]:
        store: LayerStore = self.cache.cache.stores[self._inputs(name)]
        slots = self.cache.slots(positions)
        return store.keys.index_select(2, slots)[:, 0], store.values.index_select(2, slots)[:, 0]


def _nothing_beside(states: Tensor) -> Tensor:
    """Values without a dimension, beside keys."""
    return states.new_empty(*states.shape[:3], 0)
