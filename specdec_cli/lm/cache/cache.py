"""Keys and values in blocks, and the layout of one packed forward over them.

A forward's tokens are the missing tokens of all its rows, one row after another. Its `Layout` says where their keys
are written and which keys each span of queries reads. transformers' moving cache API is met here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specdec_cli.lm.cache.memory import zeros

# Attention reads keys in multiples of this many where bits matter: a query's key count then follows from its position
# alone, and a sum over more masked keys need not round alike.
KEY_GRAIN = 64
# More pieces to write than this go through one indexed copy.
MAX_PIECES = 8


@dataclass(slots=True)
class Span:
    """Neighbouring queries of one sequence that attend together.

    Args:
        start: the first query's place among the forward's tokens.
        stop: one behind the last query's place.
        num_keys: how many keys they read, from position 0 on; masks hide those behind a query.
        first_slot: where the keys begin, when they lie in one piece.
        slots: slot of every key [num_keys] int64, when they do not.
        position: the first query's position in its sequence.
    """

    start: int
    stop: int
    num_keys: int
    first_slot: int
    slots: Tensor | None
    position: int = 0


@dataclass
class Layout:
    """One forward: n tokens of several sequences.

    Args:
        places: each token's position in its own sequence.
        spans: the queries, in order; together they cover all n tokens.
        pieces: (start, stop, slot): tokens start..stop-1 are written to slot, slot+1, ...
        num_written: the first so many tokens are written (a padding token is not).
        bitwise: attention must give a row the same bits in whatever company.
        device: where the forward runs.
        kernels: what attends all sequences at once (`lm.split_attention`); None where spans are taken one by one.
        slots: for it, those of the keys at every position of every sequence [B, T] int64.
    """

    places: list[int]
    spans: list[Span]
    pieces: list[tuple[int, int, int]]
    num_written: int
    bitwise: bool
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kernels: Any = None
    slots: Tensor | None = None

    @cached_property
    def positions(self) -> Tensor:
        """The places [1, n] int64."""
        return torch.tensor([self.places], device=self.device)

    @cached_property
    def key_positions(self) -> Tensor:
        """Positions of the longest span's keys [T] int64."""
        return torch.arange(max(span.num_keys for span in self.spans), device=self.device)

    @cached_property
    def write_slots(self) -> Tensor | None:
        """Slot of every written token [num_written] int64; None when there are few pieces."""
        if len(self.pieces) <= MAX_PIECES:
            return None
        slots = [slot + i for start, stop, slot in self.pieces for i in range(stop - start)]
        return torch.tensor(slots, device=self.device)


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


@dataclass(eq=False)
class BlockCache(Cache):  # type: ignore[misc]
    """The cache object that a transformers model gets. It stores new keys and values by the current layout.

    Args:
        num_slots: tokens that each layer has room for.
        contiguous: `update` returns all rows' keys and values joined, for models whose attention cannot be replaced.
    """

    num_slots: int
    contiguous: bool = False
    stores: dict[int, LayerStore] = field(default_factory=dict)
    layout: Layout | None = None

    def __post_init__(self) -> None:
        super().__init__(layers=[])

    @contextmanager
    def running(self, layout: Layout) -> Iterator[None]:
        """File what a forward brings under a layout."""
        self.layout = layout
        try:
            yield
        finally:
            self.layout = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Store a layer's new keys and values; return what its attention reads."""
        layout = self.layout
        assert layout is not None, "a forward began without a layout"
        store = self.stores.get(layer_idx)
        if store is None:
            store = self.stores[layer_idx] = LayerStore(key_states, value_states, self.num_slots)
        store.write(key_states, value_states, layout)
        if not self.contiguous:
            return store, store
        keys, values = zip(*(store.read(span) for span in layout.spans), strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[Any, int]:
        """The layout itself: transformers hands it to our mask function, which knows what to do with it."""
        return self.layout, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Positions are explicit; there is no offset."""
        return 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens cached before this forward, over all rows."""
        if self.layout is None:
            return 0
        return sum(span.num_keys - (span.stop - span.start) for span in self.layout.spans)
