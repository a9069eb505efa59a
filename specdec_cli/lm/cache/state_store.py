"""Kept states of one layer: of several sequences, after several of their tokens."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from specdec_cli.lm.cache.memory import zeros


class StateStore:
    """States in slots [slots, *shape]; there are as many as were needed.

    Args:
        shape: of one state.
        dtype: of its numbers.
        device: where.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self._dtype, self._device = dtype, device
        self._kept = self._room(0)

    @property
    def slot_bytes(self) -> int:
        """Memory of one state."""
        return prod(self.shape) * self._dtype.itemsize

    def read(self, slots: Tensor, num_slots: int) -> Tensor:
        """Copies of the states in some slots [m, *shape]."""
        if num_slots > len(self._kept):
            kept, self._kept = self._kept, self._room(num_slots)
            self._kept[: len(kept)] = kept
        return self._kept.index_select(0, slots)

    def write(self, slots: Tensor, states: Tensor) -> None:
        """Keep states [m, *shape], each in a slot."""
        self._kept.index_copy_(0, slots, states.to(self._dtype))

    def _room(self, num_slots: int) -> Tensor:
        shape = (num_slots, *self.shape)
        if self._device.type == "cpu" and num_slots:
            return zeros(shape, self._dtype, in_huge_pages=False)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)
