"""The order in which a recurrence reads a forward's tokens: the first one of every sequence, then the second ones, ...

Sequences are taken together, and each token is a step of its own, so that a state has the same bits however its tokens
were grouped into forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_cli.lm.cache.layout import Layout, Stretch


@dataclass(frozen=True, slots=True)
class Passage:
    """Some steps, whose states are in memory together.

    Args:
        rows: of the order.
        steps: rows of each step, counted from the piece's first.
        kept: rows whose states are kept, counted likewise [m] int64.
        slots: where [m] int64.
        stored: rows whose states are stored with a prefix, counted likewise [s] int64.
        prefixes: the slots of these snapshots [s] int64.
    """

    rows: slice
    steps: list[slice]
    kept: Tensor
    slots: Tensor
    stored: Tensor
    prefixes: Tensor


@dataclass(frozen=True, slots=True)
class Windows:
    """Inputs of a convolution: each sequence's last ones before its new ones.

    Args:
        num_slots: in all.
        before: slots of the earlier inputs, sequence by sequence, [sequences × (width - 1)] int64.
        places: of each token's first input among earlier and new ones [n] int64.
        kept: tokens whose inputs are kept [m] int64.
        slots: where [m] int64.
        stored: places of the inputs that are stored with prefixes, among earlier and new ones [s × (width - 1)] int64.
        prefixes: the slots of these snapshots [s] int64.
    """

    num_slots: int
    before: Tensor
    places: Tensor
    kept: Tensor
    slots: Tensor
    stored: Tensor
    prefixes: Tensor


class Order:
    """The order of one forward.

    Args:
        layout: of the forward.

    Attributes:
        stretches: the sequences, as they lie in the forward.
        first: slots of the states to begin with, the longest stretch first [sequences] int64.
        num_slots: slots of a layer's states.
    """

    def __init__(self, layout: Layout) -> None:
        self.stretches = layout.stretches
        self._device, self._num_written = layout.device, layout.num_written
        self._longest_first = sorted(self.stretches, key=lambda one: one.start - one.stop)
        self.first = self._index([_begin(one) for one in self._longest_first])
        self.num_slots = max(one.snapshots.num_slots() for one in self.stretches)
        self._steps, tokens = self._walk()
        is_turned = len(self.stretches) > 1
        self._tokens = self._index(tokens) if is_turned else None
        self._rows = self._tokens.argsort() if self._tokens is not None else None
        self._kept, self._stored = self._keep(), self._store()
        self._pieces: dict[int, list[Passage]] = {}
        self._windows: dict[int, Windows] = {}

    def turn(self, tokens: Tensor) -> Tensor:
        """The recurrence's order of what is given in the forward's [n, ...]."""
        return tokens if self._tokens is None else tokens.index_select(0, self._tokens)

    def turn_back(self, rows: Tensor) -> Tensor:
        """The forward's order of what is given in the recurrence's [n, ...]."""
        return rows if self._rows is None else rows.index_select(0, self._rows)

    def pieces(self, most_rows: int) -> list[Passage]:
        """The steps in pieces of so many rows, or of one step."""
        if most_rows not in self._pieces:
            self._pieces[most_rows] = self._cut(most_rows)
        return self._pieces[most_rows]

    def windows(self, width: int) -> Windows:
        """Inputs of a convolution of a width."""
        if width not in self._windows:
            self._windows[width] = self._look_back(width)
        return self._windows[width]

    def _walk(self) -> tuple[list[slice], list[int]]:
        """Rows of every step, and each row's place in the forward."""
        steps, tokens = [], list[int]()
        active = list(self._longest_first)
        for step in range(self._longest_first[0].stop - self._longest_first[0].start):
            while active[-1].stop - active[-1].start <= step:
                active.pop()
            steps.append(slice(len(tokens), len(tokens) + len(active)))
            tokens += [one.start + step for one in active]
        return steps, tokens

    def _keep(self) -> list[tuple[int, int]]:
        """Rows whose states are kept, in order, and their slots."""
        kept = []
        for number, one in enumerate(self._longest_first):
            count = self._num_new(one)
            for step in range(max(0, count - one.snapshots.room), count):
                kept.append((self._steps[step].start + number, one.snapshots.slot(one.length + step + 1)))
        return sorted(kept)

    def _store(self) -> list[tuple[int, int]]:
        """Rows whose states are stored with a prefix, in order, and the slots of these snapshots."""
        found = [
            (self._steps[step].start + number, slot)
            for number, one in enumerate(self._longest_first)
            for step, slot in self._reserved(one)
        ]
        return sorted(found)

    def _reserved(self, stretch: Stretch) -> list[tuple[int, int]]:
        """Which of its new tokens a stretch stores the state after, and the slots of these snapshots."""
        count, length = self._num_new(stretch), stretch.length
        reserved = stretch.snapshots.reserved.items()
        return [(end - length - 1, slot) for end, slot in reserved if length < end <= length + count]

    def _num_new(self, stretch: Stretch) -> int:
        """Tokens of a stretch that are part of its text: all but one that is only company."""
        return min(stretch.stop, self._num_written) - stretch.start

    def _cut(self, most_rows: int) -> list[Passage]:
        pieces, begin = [], 0
        while begin < len(self._steps):
            first, end = self._steps[begin].start, begin + 1
            while end < len(self._steps) and self._steps[end].stop - first <= most_rows:
                end += 1
            steps = [slice(one.start - first, one.stop - first) for one in self._steps[begin:end]]
            rows = slice(first, self._steps[end - 1].stop)
            kept, stored = (
                [(row - first, slot) for row, slot in pairs if rows.start <= row < rows.stop]
                for pairs in (self._kept, self._stored)
            )
            found = [self._index([pair[i] for pair in pairs]) for pairs in (kept, stored) for i in (0, 1)]
            pieces.append(Passage(rows, steps, *found))
            begin = end
        return pieces

    def _look_back(self, width: int) -> Windows:
        back = width - 1
        before, places, kept, slots, stored, prefixes = (list[int]() for _ in range(6))
        for number, one in enumerate(self.stretches):
            snapshots, first = one.snapshots, one.start + number * back
            before += [snapshots.slot_of(i, back) for i in _inputs_before(one, back)]
            places += range(first, first + one.stop - one.start)
            new = range(self._num_new(one))[-(snapshots.room + back - 1) :]
            kept += [one.start + i for i in new]
            slots += [snapshots.slot_of(one.length + i, back) for i in new]
            for token, slot in self._reserved(one):
                stored += range(first + token + 1, first + token + 1 + back)
                prefixes.append(slot)
        num_slots = max(one.snapshots.num_slots(back) for one in self.stretches)
        return Windows(num_slots, *(self._index(one) for one in (before, places, kept, slots, stored, prefixes)))

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def _begin(stretch: Stretch) -> int:
    """The slot of the state that a stretch continues."""
    return stretch.snapshots.slot(stretch.length)


def _inputs_before(stretch: Stretch, count: int) -> range:
    """Positions of the last inputs before a stretch, negative ones before the text."""
    return range(stretch.length - count, stretch.length)
