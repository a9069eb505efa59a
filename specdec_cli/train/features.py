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
from specdec_cli.train.target import OutputLayer

_SHARD = 64  # samples in a file of hidden states
_TOGETHER = 8  # samples that the target reads at once
_TOP = ".top"  # ends the names of the most likely tokens


class TargetFeatures:
    """Batches with the target's logits and hidden states, computed when they are asked for.

    Args:
        lm: the target.
        taps: hidden states that the method reads.
        drafted: tokens [D] int64 that the draft can draft; None for all.

    Raises:
        UsageError: the target has no such layers, or cannot give hidden states.
    """

    def __init__(self, lm: LM, taps: Sequence[Tap], drafted: Tensor | None = None) -> None:
        self._lm, self._drafted = lm, None if drafted is None else drafted.to(lm.device)
        new = [tap for tap in taps if tap not in lm.taps]
        if new:
            lm.tap(new)
        self._columns = [lm.taps.index(tap) for tap in taps]
        self._handles = count(-1, -1)  # the engine counts its sequences from 0

    def batch(self, samples: Sequence[Sample]) -> TrainingBatch:
        """A batch of samples, in one forward of the target."""
        tokens, is_counted = padded(samples, self._lm.device)
        nums = [_num_logits(sample) for sample in samples]
        logits, states = self._read(samples, nums)
        features = _side_by_side(states, tokens) if self._columns else None
        parts, is_drafted = torch.split(logits, nums), None
        if self._drafted is not None:
            tops = [torch.isin(part.argmax(-1), self._drafted) for part in parts]
            is_drafted = _side_by_side(tops, tokens, samples) > 0
            parts = tuple(part[:, self._drafted] for part in parts)
        return TrainingBatch(tokens, is_counted, features, _side_by_side(parts, tokens, samples), is_drafted)

    def states(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Hidden states [n, taps, hidden] of each sample."""
        return self._read(samples, [0] * len(samples))[1]

    def _read(self, samples: Sequence[Sample], nums: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """The last so many logits of each sample, one below the other, and all hidden states; none without taps."""
        rows = [self._row(sample, num) for sample, num in zip(samples, nums, strict=True)]
        try:
            logits = self._lm.score(rows)
        finally:
            for row in rows:
                self._lm.release(row.handle)
        states = [row.tapped.states[:, self._columns] for row in rows if row.tapped and row.tapped.states is not None]
        return logits, states

    def _row(self, sample: Sample, num: int) -> Row:
        tapped = Tapped() if self._columns else None
        return Row(next(self._handles), list(sample.tokens), num, tapped=tapped)


class CachedFeatures:
    """Batches from hidden states that lie on disk: those that the method reads, and the final ones for the logits.

    The states are rounded to bfloat16. Whole shards of a stopped run are used again, damaged ones written again.

    Args:
        lm: the target.
        taps: hidden states that the method reads.
        folder: for the shards.
        samples: all samples of the run.
        output: the target's output layer for the tokens that the draft can draft; None for all.

    Raises:
        UsageError: the target has no such layers, or cannot give hidden states.
        RunError: the disk has no room for them.
    """

    def __init__(
        self, lm: LM, taps: Sequence[Tap], folder: Path, samples: Sequence[Sample], output: OutputLayer | None = None
    ) -> None:
        self._lm, self._folder, self._samples, self._num_taps = lm, folder, samples, len(taps)
        self._output = output
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

        Raises:
            RunError: the disk is full, or the folder cannot be written.
        """
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
        progress(0, len(self._samples))
        for begin in range(index * _SHARD, len(self._samples), num * _SHARD):
            if stopped():
                return
            if begin not in self._written:
                self._write(begin)
            progress(min(begin + _SHARD, len(self._samples)), len(self._samples))

    def batch(self, samples: Sequence[Sample]) -> TrainingBatch:
        """A batch of samples; the target computes its output layer alone, for the tokens that the draft can draft."""
        tokens, is_counted = padded(samples, self._lm.device)
        places = [self._places[id(sample)] for sample in samples]
        states, nums = [self._states(place) for place in places], [_num_logits(sample) for sample in samples]
        final = torch.cat([state[len(state) - num :, -1] for state, num in zip(states, nums, strict=True)])
        with torch.no_grad():
            logits = self._lm.head(final) if self._output is None else self._output.logits(final)
        logits_of_batch = _side_by_side(torch.split(logits, nums), tokens, samples)
        features = _side_by_side([state[:, :-1] for state in states], tokens) if self._num_taps else None
        is_drafted = None
        if self._output is not None:
            tops = [self._stored(place, _TOP).to(self._lm.device) for place in places]
            is_drafted = _side_by_side([torch.isin(top, self._output.ids) for top in tops], tokens, samples) > 0
        return TrainingBatch(tokens, is_counted, features, logits_of_batch, is_drafted)

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
                kinds = ["", *([_TOP] if self._output is not None else [])]
                lengths = [
                    [shard.get_slice(f"{begin + i}{kind}").get_shape()[0] for kind in kinds] for i in range(len(part))
                ]
        except (OSError, SafetensorError):
            return False
        return lengths == [[len(sample.tokens), _num_logits(sample)][: len(kinds)] for sample in part]

    def _write(self, begin: int) -> None:
        tensors: dict[str, Tensor] = {}
        for first in range(begin, min(begin + _SHARD, len(self._samples)), _TOGETHER):
            part = self._samples[first : min(first + _TOGETHER, begin + _SHARD)]
            states = self._features.states(part)
            tensors |= {str(first + i): state.to("cpu", torch.bfloat16).contiguous() for i, state in enumerate(states)}
            if self._output is not None:
                pairs = enumerate(zip(part, states, strict=True))
                tensors |= {f"{first + i}{_TOP}": self._top(sample, state).cpu() for i, (sample, state) in pairs}
        path = self._path(begin)
        half = path.with_suffix(".new")
        with writing(path), deleted_on_error(half):
            save_file(tensors, half)
            half.replace(path)

    def _top(self, sample: Sample, states: Tensor) -> Tensor:
        """The target's most likely token [n] int32 at each position whose logits count."""
        with torch.no_grad():
            return self._lm.head(states[-_num_logits(sample) :, -1]).argmax(-1).int()

    def _states(self, place: int) -> Tensor:
        """States [n, taps + 1, hidden] of a sample in the target's dtype."""
        return self._stored(place).to(self._lm.device, self._lm.dtype)

    def _stored(self, place: int, kind: str = "") -> Tensor:
        number = place // _SHARD
        if number not in self._shards:
            self._shards[number] = safe_open(self._path(place), framework="pt")
        stored: Tensor = self._shards[number].get_tensor(f"{place}{kind}")
        return stored


def _num_logits(sample: Sample) -> int:
    """Positions at the end of a sample whose logits predict its answers, and one behind them."""
    return len(sample.tokens) - max(sample.num_prompt_tokens - 1, 0)


def _side_by_side(parts: Sequence[Tensor], tokens: Tensor, samples: Sequence[Sample] | None = None) -> Tensor:
    """Tensors [n, ...] of each sample as one [B, N, ...] float32 that autograd may read, zero elsewhere.

    They begin where the samples do, or with `samples`, end where these end.
    """
    whole = torch.zeros(*tokens.shape, *parts[0].shape[1:], device=tokens.device)
    for row, part in enumerate(parts):
        end = len(part) if samples is None else len(samples[row].tokens)
        whole[row, end - len(part) : end] = part
    return whole
