"""The target's side of a batch: its logits, and the hidden states that a method reads, computed or kept on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec_cli.errors import RunError
from specdec_cli.lm.door import LM, Row, Tap, Tapped
from specdec_cli.quantities import sized
from specdec_cli.train.disk import deleted_on_error, writing
from specdec_cli.train.samples import Sample, TrainingBatch, padded

_SHARD = 64  # samples in a file of hidden states
_TOGETHER = 8  # samples that the target reads at once


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
        logits, states = self.read(samples)
        logits_of_batch = _side_by_side(logits, tokens)
        features = _side_by_side(states, tokens) if self._columns else None
        return TrainingBatch(tokens, is_counted, features, logits_of_batch)

    def read(self, samples: Sequence[Sample]) -> tuple[list[Tensor], list[Tensor]]:
        """Logits [n, V] and hidden states [n, taps, hidden] of each sample; no states without taps."""
        rows = [self._row(sample) for sample in samples]
        try:
            logits = self._lm.score(rows)
        finally:
            for row in rows:
                self._lm.release(row.handle)
        states = [row.tapped.states[:, self._columns] for row in rows if row.tapped and row.tapped.states is not None]
        return list(torch.split(logits, [len(sample.tokens) for sample in samples])), states

    def _row(self, sample: Sample) -> Row:
        tapped = Tapped() if self._columns else None
        return Row(next(self._handles), list(sample.tokens), len(sample.tokens), tapped=tapped)


class CachedFeatures:
    """Batches from hidden states that lie on disk: those that the method reads, and the final ones for the logits.

    The states are rounded to bfloat16. Whole shards of a stopped run are used again, damaged ones written again.

    Args:
        lm: the target.
        taps: hidden states that the method reads.
        folder: for the shards.
        samples: all samples of the run.

    Raises:
        UsageError: the target has no such layers, or cannot give hidden states.
        RunError: the disk has no room for them.
    """

    def __init__(self, lm: LM, taps: Sequence[Tap], folder: Path, samples: Sequence[Sample]) -> None:
        self._lm, self._folder, self._samples, self._num_taps = lm, folder, samples, len(taps)
        self._features = TargetFeatures(lm, (*taps, "final"))
        self._places = {id(sample): place for place, sample in enumerate(samples)}
        self._shards: dict[int, Any] = {}
        self._written = {begin for begin in range(0, len(samples), _SHARD) if self._is_whole(begin)}
        missing = sum(len(sample.tokens) for i, sample in enumerate(samples) if i - i % _SHARD not in self._written)
        self.num_bytes = sum(len(sample.tokens) for sample in samples) * self._bytes_per_token
        free = shutil.disk_usage(folder.parent).free
        if missing * self._bytes_per_token > free:
            message = f"the target's hidden states take {sized(self.num_bytes)}, and `{folder.parent}` has"
            hint = "leave --cache-features out, use fewer prompts, or name an --output on another disk"
            raise RunError(f"{message} {sized(free)} left", hint)

    def prepare(
        self, progress: Callable[[int, int], None], stopped: Callable[[], bool], index: int = 0, num: int = 1
    ) -> None:
        """Write the shards that are missing, or this process's share of them.

        Args:
            progress: told how many samples are done, and of how many.
            stopped: asked between shards.
            index: of this process, from 0.
            num: processes that share the shards.

        Raises:
            RunError: the disk is full, or the folder cannot be written.
        """
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
        for begin in range(index * _SHARD, len(self._samples), num * _SHARD):
            if stopped():
                return
            if begin not in self._written:
                self._write(begin)
            progress(min(begin + _SHARD, len(self._samples)), len(self._samples))

    def batch(self, samples: Sequence[Sample]) -> TrainingBatch:
        """A batch of samples; the target computes its output layer alone."""
        tokens, is_counted = padded(samples, self._lm.device)
        states = [self._states(self._places[id(sample)]) for sample in samples]
        with torch.no_grad():
            logits = self._lm.head(torch.cat([state[:, -1] for state in states]))
        logits_of_batch = _side_by_side(torch.split(logits, [len(state) for state in states]), tokens)
        features = _side_by_side([state[:, :-1] for state in states], tokens) if self._num_taps else None
        return TrainingBatch(tokens, is_counted, features, logits_of_batch)

    @property
    def _bytes_per_token(self) -> int:
        width = self._lm.embed([0]).shape[-1]
        return (self._num_taps + 1) * width * torch.bfloat16.itemsize

    def _path(self, place: int) -> Path:
        return self._folder / f"{place // _SHARD:06d}.safetensors"

    def _is_whole(self, begin: int) -> bool:
        """Whether the shard that begins with a sample is there, readable, and of samples of these lengths."""
        part = self._samples[begin : begin + _SHARD]
        try:
            with safe_open(self._path(begin), framework="pt") as shard:
                lengths = [shard.get_slice(str(begin + i)).get_shape()[0] for i in range(len(part))]
        except (OSError, SafetensorError):
            return False
        return lengths == [len(sample.tokens) for sample in part]

    def _write(self, begin: int) -> None:
        tensors: dict[str, Tensor] = {}
        for first in range(begin, min(begin + _SHARD, len(self._samples)), _TOGETHER):
            part = self._samples[first : min(first + _TOGETHER, begin + _SHARD)]
            states = self._features.read(part)[1]
            tensors |= {str(first + i): state.to("cpu", torch.bfloat16).contiguous() for i, state in enumerate(states)}
        path = self._path(begin)
        half = path.with_suffix(".new")
        with writing(path), deleted_on_error(half):
            save_file(tensors, half)
            half.replace(path)

    def _states(self, place: int) -> Tensor:
        """States [n, taps + 1, hidden] of a sample in the target's dtype."""
        number = place // _SHARD
        if number not in self._shards:
            self._shards[number] = safe_open(self._path(place), framework="pt")
        stored: Tensor = self._shards[number].get_tensor(str(place))
        return stored.to(self._lm.device, self._lm.dtype)


def _side_by_side(parts: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """Tensors [n, ...] of each sample as one [B, N, ...] float32 that autograd may read, zero behind their ends."""
    whole = torch.zeros(*tokens.shape, *parts[0].shape[1:], device=tokens.device)
    for row, part in enumerate(parts):
        whole[row, : len(part)] = part
    return whole
