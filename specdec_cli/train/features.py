"""The target's side of a batch: its logits, and the hidden states that a method reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from specdec_cli.lm.door import LM, Row, Tap, Tapped
from specdec_cli.train.samples import Sample, TrainingBatch, padded


class TargetFeatures:
    """Batches with the target's logits and hidden states, computed when they are asked for.

    Args:
        lm: the target.
        taps: hidden states that the method reads.

    Raises:
        UsageError: the target has no such layers, or cannot give hidden states.
    """

    def __init__(self, lm: LM, taps: Sequence[Tap]) -> None:
        self._lm = lm
        new = [tap for tap in taps if tap not in lm.taps]
        if new:
            lm.tap(new)
        self._columns = [lm.taps.index(tap) for tap in taps]
        self._handles = count(-1, -1)  # the engine counts its sequences from 0

    def batch(self, samples: Sequence[Sample]) -> TrainingBatch:
        """A batch of samples, in one forward of the target."""
        tokens, is_counted = padded(samples, self._lm.device)
        rows = [self._row(one) for one in samples]
        try:
            logits = self._lm.score(rows)
        finally:
            for row in rows:
                self._lm.release(row.handle)
        lengths = [len(one.tokens) for one in samples]
        given = _side_by_side(torch.split(logits, lengths), tokens)
        if not self._columns:
            return TrainingBatch(tokens, is_counted, None, given)
        states = [row.tapped.states[:, self._columns] for row in rows if row.tapped and row.tapped.states is not None]
        return TrainingBatch(tokens, is_counted, _side_by_side(states, tokens), given)

    def _row(self, sample: Sample) -> Row:
        tapped = Tapped() if self._columns else None
        return Row(next(self._handles), list(sample.tokens), len(sample.tokens), tapped=tapped)


def _side_by_side(parts: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """Tensors [n, ...] of each sample as one [B, N, ...] float32 that autograd may read, zero behind their ends."""
    whole = torch.zeros(*tokens.shape, *parts[0].shape[1:], device=tokens.device)
    for row, part in enumerate(parts):
        whole[row, : len(part)] = part
    return whole
