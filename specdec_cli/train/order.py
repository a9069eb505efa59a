"""Which samples each step takes: a function of the seed and the step's number alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BATCHES_TOGETHER = 16


class SampleOrder:
    """Batches of samples of similar length, shuffled again in each epoch.

    Args:
        lengths: tokens of each sample.
        batch_size: samples in a batch; the last batch of an epoch may be smaller.
        seed: of the shuffling.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        assert lengths, "there are samples to order"
        self._lengths, self._size, self._seed = lengths, batch_size, seed
        self._epoch, self._batches = -1, [[0]]

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return -(-len(self._lengths) // self._size)

    def samples_of(self, step: int) -> list[int]:
        """The samples of a step, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffled(epoch)
        return self._batches[place]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
        places = torch.randperm(len(self._lengths), generator=generator).tolist()
        batches: list[list[int]] = []
        num = self._size * _BATCHES_TOGETHER
        for begin in range(0, len(places), num):  # samples of similar length share a batch, which then pads little
            near = sorted(places[begin : begin + num], key=lambda place: self._lengths[place])
            batches += [near[i : i + self._size] for i in range(0, len(near), self._size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
