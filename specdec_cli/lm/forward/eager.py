"""transformers' own forward, eager, over a block cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.cache.cache import BlockCache
from specdec_cli.lm.cache.contexts import ForwardInput, Moves
from specdec_cli.lm.cache.layout import KEY_GRAIN, Layout, Layouts
from specdec_cli.lm.cache.snapshots import Snapshots
from specdec_cli.lm.door import DraftForm, Draw, Tap
from specdec_cli.lm.forward.forward import CacheShape, WithoutGraphs, on_its_device
from specdec_cli.lm.forward.packed import PackedForward
from specdec_cli.lm.forward.taps import output_layer
from specdec_cli.transfer import sent


class EagerForward(WithoutGraphs):
    """Packed forwards of a transformers model.

    Attributes:
        model: the transformers model.
        layouts: of its forwards.
        cache: what its forwards read and write.
        num_slots: tokens that each layer of the cache has room for.
        hooks: copy hidden states while a forward runs.
    """

    can_guess = can_draw = can_branch = False
    graphs_obstacle: str | None = None

    def __init__(
        self,
        packed: PackedForward,
        shape: CacheShape,
        layouts: Layouts,
        threads: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.model: Any = packed.model
        self.shape = shape
        self.layouts = layouts
        self.spreads_nan = packed.is_bitwise
        self.hooks = packed.hooks
        self._packed = packed
        self._threads = threads
        self.allocate(0)

    @property
    def name(self) -> str:
        """`transformers`."""
        return "transformers"

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.layouts.device

    @property
    def has_taken_cache(self) -> bool:
        """Whether a forward has run on a GPU."""
        return self.device.type == "cuda" and bool(self.cache.stores)

    def allocate(self, num_blocks: int, num_prefix_states: int = 0) -> None:
        """Recreate the cache."""
        self.num_slots = num_blocks * self.layouts.block_size + KEY_GRAIN
        self.cache = BlockCache(self.num_slots, self._packed.has_joined_keys, num_prefix_states)

    @on_its_device
    def score(self, feeds: Sequence[ForwardInput]) -> Tensor:
        """The wanted logits [sum of num_logits, V] float32."""
        for feed in feeds:
            feed.settle()
        return self.layouts.score(feeds, self.run, self.shape.vocab_size)

    def run(self, layout: Layout) -> Tensor:
        """One forward; logits [len(wanted), V] float32."""
        with self._threads():
            return self._packed.run(self.cache, layout)

    def guess(
        self,
        feeds: Sequence[ForwardInput],
        counts: Sequence[int],
        draws: Sequence[Draw | None],
        num_tokens: int,
        form: DraftForm,
    ) -> None:
        """None: transformers' forward continues a sequence no quicker than `score`, token by token."""

    def move(self, moves: Moves) -> None:
        """Copy keys and values from slots to others."""
        self.cache.move(*sent(moves, torch.int64, self.device).t())

    def move_states(self, snapshots: Snapshots, moves: Moves) -> None:
        """Copy states from places to others."""
        self.cache.move_states(snapshots, moves)

    def keep(self, slot: int, snapshots: Snapshots, length: int) -> None:
        """Copy a sequence's states to a snapshot."""
        self.cache.keep(slot, snapshots, length)

    def restore(self, slot: int, snapshots: Snapshots, length: int) -> None:
        """Copy a snapshot's states to a sequence."""
        self.cache.restore(slot, snapshots, length)

    def tap(self, taps: Sequence[Tap]) -> None:
        """Add hidden states to those that `score` gives to feeds that want them."""
        self.hooks.add(taps)

    @on_its_device
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [n, hidden]."""
        with torch.inference_mode():
            embeddings: Tensor = self.model.get_input_embeddings()(sent(tokens, torch.int64, self.device))
        return embeddings.clone()  # callers may write into it, outside inference mode too

    @on_its_device
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] float32 of final hidden states [n, hidden]."""
        with self._threads():
            return output_layer(self.model, hidden)

    def wipe(self, blocks: Sequence[int]) -> None:
        """Put zeros into blocks: nothing times NaN is NaN, masked or not."""
        for block in blocks:
            for store in self.cache.stores.values():
                store.wipe(block * self.layouts.block_size, self.layouts.block_size)
