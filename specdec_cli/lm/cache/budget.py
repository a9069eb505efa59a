"""The memory that loaded models leave of a device, with what their caches have still to take."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

import torch

from specdec_cli.lm.cache.cache_plan import CacheNeed, Room
from specdec_cli.lm.machine.device_memory import device_memory


class CacheHolder(Protocol):
    """A model with a cache on a device.

    Attributes:
        device: where.
    """

    device: torch.device

    @property
    def promised_bytes(self) -> int:
        """Memory that its cache has still to take."""
        ...


class DraftCache(CacheHolder, Protocol):
    """A draft's cache on a device, planned beside the target's.

    Attributes:
        device: where.
        block_size: tokens in a block.
        num_blocks: blocks in all.
        vocab_size: V, the width of its logits.
    """

    block_size: int
    num_blocks: int
    vocab_size: int

    @property
    def weight_bytes(self) -> int:
        """Memory of the draft's weights."""
        ...

    def draft_cache_need(self, num_seqs: int, num_drafted: int, target_context: int) -> CacheNeed:
        """Requirements of a cache for so many sequences, beside a target of some context limit."""
        ...

    def hold(
        self,
        num_blocks: int,
        num_seqs: int | None = None,
        extra_tokens: int | None = None,
        num_prefix_states: int | None = None,
    ) -> None:
        """Recreate the cache with so many blocks, for so many sequences, drafted tokens and snapshots of states."""
        ...


def count_in(holder: CacheHolder) -> None:
    """Leave room for a model's cache from now on, for as long as the model lives."""
    _LOADED.add(holder)


def device_room(device: torch.device, weight_bytes: int) -> Room:
    """Memory of a device that loaded models leave free, after what their caches will still take."""
    memory = device_memory(device)
    promised = sum(holder.promised_bytes for holder in _LOADED if holder.device == device)
    whole = memory.total_bytes if device.type == "cuda" else memory.free_bytes + weight_bytes
    return Room(memory.free_bytes - promised, whole, weight_bytes)


_LOADED: WeakSet[CacheHolder] = WeakSet()
