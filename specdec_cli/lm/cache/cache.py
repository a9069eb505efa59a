"""Keys and values in blocks, where a forward of transformers files and reads them.

The forward's `Layout` says where its tokens' keys are written and which keys each span of queries reads. transformers'
moving cache API is met here and nowhere else.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specdec_cli.lm.cache.contexts import Moves
from specdec_cli.lm.cache.layout import JoinedKeys, Layout, Span
from specdec_cli.lm.cache.memory import zeros
from specdec_cli.lm.cache.order import Order
from specdec_cli.lm.cache.snapshots import Snapshots
from specdec_cli.lm.cache.state_store import StateStore

Place = int | tuple[str, int]
"""A layer's index; with a name, for what a layer keeps beside keys and values."""


class LayerStore:
    """One layer's keys and values, [1, heads, slots, dim] each.

    `BlockCache.update` returns it in the place of keys and values: the attention function reads what it needs.
    """

    def __init__(self, key: Tensor, value: Tensor, num_slots: int) -> None:
        self.keys, self.values = (_room_for(states, num_slots) for states in (key, value))

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token's key and value."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in (self.keys, self.values))

    def write(self, key: Tensor, value: Tensor, layout: Layout) -> None:
        """Store new keys and values [1, heads, n, dim]."""
        slots = layout.write_slots
        if layout.kernels is not None:
            layout.kernels.write(key, value, self.keys, self.values, slots)
            return
        if slots is not None:
            self.keys.index_copy_(2, slots, key.narrow(2, 0, layout.num_written))
            self.values.index_copy_(2, slots, value.narrow(2, 0, layout.num_written))
            return
        whole = len(layout.pieces) == 1 and layout.num_written == key.shape[2]
        for start, stop, slot in layout.pieces:
            count = stop - start
            self.keys.narrow(2, slot, count).copy_(key if whole else key.narrow(2, start, count))
            self.values.narrow(2, slot, count).copy_(value if whole else value.narrow(2, start, count))

    def move(self, before: Tensor, after: Tensor) -> None:
        """Copy states from slots [n] int64 to others; all are read before one is written."""
        with torch.inference_mode():
            for kept in (self.keys, self.values):
                kept.index_copy_(2, after, kept.index_select(2, before))

    def wipe(self, slot: int, count: int) -> None:
        """Put zeros into some slots."""
        with torch.inference_mode():
            for kept in (self.keys, self.values):
                kept.narrow(2, slot, count).zero_()

    def read(self, span: Span) -> tuple[Tensor, Tensor]:
        """Keys and values [1, heads, T, dim] that a span's queries see; views where they lie in one piece."""
        if span.slots is not None:
            return self.keys.index_select(2, span.slots), self.values.index_select(2, span.slots)
        first, count = span.first_slot, span.num_keys
        return self.keys.narrow(2, first, count), self.values.narrow(2, first, count)


def _room_for(states: Tensor, num_slots: int) -> Tensor:
    """Zeros for so many tokens' states, because masked keys are read too, and nothing times NaN is NaN."""
    shape = (1, states.shape[1], num_slots, states.shape[3])
    is_on_cpu = states.device.type == "cpu"
    return zeros(shape, states.dtype, in_huge_pages=False) if is_on_cpu else states.new_zeros(shape)


def cache_parameter(forward: Callable[..., Any]) -> str | None:
    """Name of the parameter in which a forward of transformers takes its cache; None if it takes none.

    transformers 5.24 renamed most to `cache`; a model's own code, RWKV and older versions have other names.
    """
    parameters = inspect.signature(forward).parameters
    return next((name for name in ("past_key_values", "cache_params", "cache", "state") if name in parameters), None)


_RUNNING: ContextVar[BlockCache | None] = ContextVar("running cache", default=None)


def running_cache() -> BlockCache | None:
    """The block cache of the forward that this thread is in; None outside of one."""
    return _RUNNING.get()


def running_layout() -> Layout | None:
    """The layout of the forward on a block cache that this thread is in; None outside of one."""
    cache = _RUNNING.get()
    return None if cache is None else cache.layout


class _NoLayers(list[Any]):
    """transformers' list of layers, of which there are none; any that is asked for knows the positions of keys."""

    def __init__(self, cache: BlockCache) -> None:
        super().__init__()
        self._cache = cache

    def __getitem__(self, _: Any) -> Any:
        return self

    @property
    def indexer_position_ids(self) -> Tensor:
        """Positions [3, 1, T] of the longest span's keys, before which Qwen4 puts no others."""
        assert self._cache.layout is not None, "a forward began without a layout"
        return self._cache.layout.key_positions.expand(3, 1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, _: Tensor) -> None:
        """Nothing to keep: the next forward's layout has its own."""


@dataclass(eq=False)
class BlockCache(Cache):  # type: ignore[misc]
    """The cache object that a transformers model gets. It stores new keys and values by the current layout.

    Args:
        num_slots: tokens that each layer has room for.
        contiguous: `update` returns all rows' keys and values joined, for models whose attention cannot be replaced.
        num_prefix_states: snapshots of states at the ends of cached prefixes that each layer has room for.
    """

    num_slots: int
    contiguous: bool = False
    num_prefix_states: int = 0
    stores: dict[Place, LayerStore] = field(default_factory=dict)
    layout: Layout | None = None
    states: dict[Any, StateStore] = field(default_factory=dict)
    seqlen_offset: int = 0  # xLSTM counts tokens in it
    _order: Order | None = None

    def __post_init__(self) -> None:
        super().__init__(layers=[])
        self.layers = _NoLayers(self)

    @contextmanager
    def running(self, layout: Layout) -> Iterator[None]:
        """File what a forward brings under a layout."""
        self.layout = layout
        before = _RUNNING.set(self)
        try:
            yield
        finally:
            self.layout = self._order = None
            _RUNNING.reset(before)

    def states_of(self, name: Any, shape: tuple[int, ...], dtype: torch.dtype, width: int) -> tuple[StateStore, Order]:
        """Kept states, by a name of their own, and the order in which this forward goes through them."""
        layout = self.layout
        assert layout is not None, "a forward began without a layout"
        assert layout.stretches, "the model's state was not found when it was loaded"
        if self._order is None:
            self._order = Order(layout)
        if name not in self.states:
            self.states[name] = StateStore(shape, dtype, layout.device, width, self.num_prefix_states)
        return self.states[name], self._order

    @property
    def rnn_state(self) -> Mapping[int, BlockCache]:
        """The states that xLSTM hands to each of its layers: the cache itself, in which there is nothing to replace."""
        return defaultdict(lambda: self)

    def restore(self, slot: int, snapshots: Snapshots, length: int) -> None:
        """Give a sequence that begins with so many cached tokens the states of their snapshot."""
        with torch.inference_mode():
            for store in self.states.values():
                store.restore(slot, snapshots, length)

    def keep(self, slot: int, snapshots: Snapshots, length: int) -> None:
        """Make a snapshot of the states that a sequence keeps after so many tokens."""
        with torch.inference_mode():
            for store in self.states.values():
                store.keep(slot, snapshots, length)

    def move(self, before: Tensor, after: Tensor) -> None:
        """Copy keys and values from slots [n] int64 to others."""
        for store in self.stores.values():
            store.move(before, after)

    def move_states(self, snapshots: Snapshots, moves: Moves) -> None:
        """Copy what a sequence keeps of some places to others."""
        with torch.inference_mode():
            for store in self.states.values():
                store.move(snapshots, moves)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Store a layer's new keys and values; return what its attention reads."""
        assert self.layout is not None, "a forward began without a layout"
        store = self.file(layer_idx, key_states, value_states, self.layout)
        return self._joined(store) if self.contiguous else (store, store)

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """None: the convolution finds what came before (`lm.families`)."""

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The new inputs of a convolution, as they are given."""
        return conv_states

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        """None: the scan finds it."""

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The result of a scan, which has kept its states by then."""
        return recurrent_states

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """False: the module hands all tokens to the scan."""
        return False

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[Any, Any]:
        """The layout itself: transformers hands it to our mask function, which knows what to do with it.

        Where keys are joined, their number [T], and the difference between each key's position and its place.
        """
        if self.layout is None or not self.contiguous:
            return self.layout, 0
        positions = self.layout.joined_key_positions
        return JoinedKeys(self.layout), positions - torch.arange(len(positions), device=self.layout.device)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """The difference between each token's position and its place, where keys are joined; else there is none."""
        return self.get_seq_length(layer_idx) if self.contiguous else 0

    def update_indexer(self, key_states: Tensor, layer_idx: int) -> Tensor:
        """Store the keys by which a layer's indexer chooses [1, n, dim]; return all rows' joined [1, T, dim]."""
        nothing = key_states.new_empty(1, 1, key_states.shape[1], 0)
        assert self.layout is not None, "a forward began without a layout"
        keys, _ = self._joined(self.file(("indexer", layer_idx), key_states.unsqueeze(1), nothing, self.layout))
        return keys.squeeze(1)

    def file(self, place: Place, key_states: Tensor, value_states: Tensor, layout: Layout) -> LayerStore:
        """Write to the store at a place."""
        store = self.store_at(place, key_states, value_states)
        store.write(key_states, value_states, layout)
        return store

    def store_at(self, place: Place, key_states: Tensor, value_states: Tensor) -> LayerStore:
        """The store at a place, which the first forward makes for states like those that are given."""
        if place not in self.stores:
            self.stores[place] = LayerStore(key_states, value_states, self.num_slots)
        return self.stores[place]

    def _joined(self, store: LayerStore) -> tuple[Tensor, Tensor]:
        """All rows' keys and values of a store, one row after the other."""
        assert self.layout is not None, "a forward began without a layout"
        keys, values = zip(*(store.read(span) for span in self.layout.spans), strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Tokens cached before this forward, over all rows.

        With a layer's index its attention asks, to count positions from there on (Llama 4): the difference [n] between
        each token's position and its place in the forward.
        """
        if self.layout is None:
            return 0
        if layer_idx is not None:
            positions = self.layout.position_ids[0]
            return positions - torch.arange(len(positions), device=self.layout.device)
        return sum(span.num_keys - (span.stop - span.start) for span in self.layout.spans)
