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
    """

    rows: slice
    steps: list[slice]
    kept: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Windows:
    """Inputs of a convolution: each sequence's last ones before its new ones.

    Args:
        before: slots of the earlier inputs, sequence by sequence, [sequences × (width - 1)] int64.
        places: of each token's first input among earlier and new ones [n] int64.
        kept: tokens whose inputs are kept [m] int64.
        slots: where [m] int64.
        num_slots: in all.
    """

    before: Tensor
    places: Tensor
    kept: Tensor
    slots: Tensor
    num_slots: int


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
        self.num_slots = 1 + max((one.snapshots.place + 1) * one.snapshots.room for one in self.stretches)
        self._steps, tokens = self._walk()
        is_turned = len(self.stretches) > 1
        self._tokens = self._index(tokens) if is_turned else None
        self._rows = self._tokens.argsort() if self._tokens is not None else None
        self._kept = self._keep()
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
            kept = [(row - first, slot) for row, slot in self._kept if rows.start <= row < rows.stop]
            pieces.append(Passage(rows, steps, *(self._index([pair[i] for pair in kept]) for i in (0, 1))))
            begin = end
        return pieces

    def _look_back(self, width: int) -> Windows:
        back = width - 1
        before, places, kept, slots, num_slots = [], [], list[int](), list[int](), 1
        for number, one in enumerate(self.stretches):
            room = one.snapshots.room + back - 1
            base = 1 + one.snapshots.place * room
            num_slots = max(num_slots, base + room)
            before += [base + i % room if i >= 0 else 0 for i in _inputs_before(one, back)]
            places += [one.start + number * back + i for i in range(one.stop - one.start)]
            new = range(self._num_new(one))[-room:]
            kept += [one.start + i for i in new]
            slots += [base + (one.length + i) % room for i in new]
        found = [self._index(one) for one in (before, places, kept, slots)]
        return Windows(found[0], found[1], found[2], found[3], num_slots)

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def _begin(stretch: Stretch) -> int:
    """The slot of the state that a stretch continues."""
    return stretch.snapshots.slot(stretch.length)


def _inputs_before(stretch: Stretch, count: int) -> range:
    """Positions of the last inputs before a stretch, negative ones before the text."""
    return range(stretch.length - count, stretch.length)
