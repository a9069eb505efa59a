"""Kept states of one layer: of several sequences, after several of their tokens, and at the ends of cached prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from specdec_cli.lm.cache.memory import zeros
from specdec_cli.lm.cache.snapshots import Snapshots


class StateStore:
    """States in slots [slots, *shape]; there are as many as were needed.

    Args:
        shape: of one state.
        dtype: of its numbers.
        device: where.
        width: states that go on together: the inputs that a convolution looks back at.
        num_prefix_states: snapshots at the ends of cached prefixes, `width` states each.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, width: int, num_prefix_states: int
    ) -> None:
        self.shape, self.width = shape, width
        self._dtype, self._device = dtype, device
        self._kept = self._room(0)
        self._prefixes = self._room(num_prefix_states * width)

    @property
    def slot_bytes(self) -> int:
        """Memory of one state."""
        return prod(self.shape) * self._dtype.itemsize

    def read(self, slots: Tensor, num_slots: int) -> Tensor:
        """Copies of the states in some slots [m, *shape]."""
        self._make_room(num_slots)
        return self._kept.index_select(0, slots)

    def write(self, slots: Tensor, states: Tensor) -> None:
        """Keep states [m, *shape], each in a slot."""
        self._kept.index_copy_(0, slots, states.to(self._dtype))

    def store(self, slots: Tensor, states: Tensor) -> None:
        """Store the states of snapshots [m × width, *shape], each snapshot in a slot [m] int64."""
        each = -1, self.width, *self.shape
        self._prefixes.view(each)[slots] = states.to(self._dtype).view(each)

    def restore(self, slot: int, snapshots: Snapshots, length: int) -> None:
        """Copy a snapshot to a sequence that begins with so many tokens."""
        self._make_room(snapshots.num_slots(self.width))
        for i in range(self.width):
            kept = snapshots.slot_of(length - self.width + i, self.width)
            self._kept[kept] = self._prefixes[slot * self.width + i]

    def keep(self, slot: int, snapshots: Snapshots, length: int) -> None:
        """Make a snapshot of the state that a sequence keeps after so many tokens."""
        for i in range(self.width):
            kept = snapshots.slot_of(length - self.width + i, self.width)
            self._prefixes[slot * self.width + i] = self._kept[kept]

    def move(self, snapshots: Snapshots, moves: Sequence[tuple[int, int]]) -> None:
        """Copy what is kept of some places of a sequence to others, in order."""
        for place, to in moves:
            self._kept[snapshots.slot_of(to, self.width)] = self._kept[snapshots.slot_of(place, self.width)]

    def _make_room(self, num_slots: int) -> None:
        if num_slots > len(self._kept):
            kept, self._kept = self._kept, self._room(num_slots)
            self._kept[: len(kept)] = kept

    def _room(self, num_slots: int) -> Tensor:
        shape = (num_slots, *self.shape)
        if self._device.type == "cpu" and num_slots:
            return zeros(shape, self._dtype, in_huge_pages=False)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)
