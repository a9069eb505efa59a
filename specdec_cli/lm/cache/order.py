"""The order in which a recurrence reads a forward's tokens: the first one of every sequence, then the second ones, ...

Sequences are taken together, and each token is a step of its own, so that a state has the same bits however its tokens
were grouped into forwards. Of a drafted tree, the nodes of one depth are a step, each from its parent's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_cli.lm.cache.layout import Layout, Stretch
from specdec_cli.transfer import sent


@dataclass(frozen=True, slots=True)
class Passage:
    """Some steps, whose states are in memory together.

    Args:
        rows: of the order.
        steps: rows of each step, counted from the piece's first.
        befores: of each step, the rows of the step before it that its own follow [rows] int64; None for its first ones.
        kept: rows whose states are kept, counted likewise [m] int64.
        slots: where [m] int64.
        stored: rows whose states are stored with a prefix, counted likewise [s] int64.
        prefixes: the slots of these snapshots [s] int64.
    """

    rows: slice
    steps: list[slice]
    befores: list[Tensor | None]
    kept: Tensor
    slots: Tensor
    stored: Tensor
    prefixes: Tensor


@dataclass(frozen=True, slots=True)
class Windows:
    """Inputs of a convolution: each sequence's last ones before its new ones.

    Args:
        num_slots: in all.
        before: slots of the earlier inputs, sequence by sequence, [sum of counts] int64.
        counts: of each sequence's earlier inputs; its new ones come behind them.
        taps: for each place of a window, of the oldest input first, which of all these inputs stand there.
        outputs: of the windows, those of the forward's tokens [n] int64; None where they are all.
        kept: tokens whose inputs are kept [m] int64.
        slots: where [m] int64.
        stored: places of the inputs that are stored with prefixes, among earlier and new ones [s × (width - 1)] int64.
        prefixes: the slots of these snapshots [s] int64.
    """

    num_slots: int
    before: Tensor
    counts: list[int]
    taps: Sequence[slice | Tensor]
    outputs: Tensor | None
    kept: Tensor
    slots: Tensor
    stored: Tensor
    prefixes: Tensor


class Order:
    """The order of one forward.

    Attributes:
        stretches: the sequences, as they lie in the forward.
        first: slots of the states that the first step's rows follow [rows] int64.
        num_slots: slots of a layer's states.
    """

    def __init__(self, layout: Layout) -> None:
        self.stretches = layout.stretches
        self._device, self._num_written = layout.device, layout.num_written
        levels = {stretch.start: _levels(stretch) for stretch in self.stretches}
        self._longest_first = sorted(self.stretches, key=lambda stretch: -len(levels[stretch.start]))
        self.first = self._index([_begin(s, i) for s in self._longest_first for i in levels[s.start][0]])
        self.num_slots = max(stretch.snapshots.num_slots() for stretch in self.stretches)
        self._steps, self._befores, tokens = self._walk(levels)
        is_turned = tokens != list(range(len(tokens)))
        self._tokens = self._index(tokens) if is_turned else None
        self._rows = self._tokens.argsort() if self._tokens is not None else None
        rows = {token: row for row, token in enumerate(tokens)} if is_turned else range(len(tokens))
        self._kept, self._stored = self._keep(rows), self._store(rows)
        self._pieces: dict[int, list[Passage]] = {}
        self._windows: dict[int, Windows] = {}

    def turn(self, tokens: Tensor) -> Tensor:
        """Rows [n, ...] in the forward's order, put into the recurrence's."""
        return tokens if self._tokens is None else tokens.index_select(0, self._tokens)

    def turn_back(self, rows: Tensor) -> Tensor:
        """Rows [n, ...] in the recurrence's order, put into the forward's."""
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

    def _walk(self, levels: dict[int, list[list[int]]]) -> tuple[list[slice], list[Tensor | None], list[int]]:
        """Rows of every step, the rows of the step before that they follow, and each row's place in the forward."""
        steps, befores, tokens = list[slice](), list[Tensor | None](), list[int]()
        active, last = list(self._longest_first), dict[int, int]()
        has_trees = any(len(stretch.tree) for stretch in active)
        for step in range(len(levels[active[0].start])):
            while len(levels[active[-1].start]) <= step:
                active.pop()
            rows = [(stretch, i) for stretch in active for i in levels[stretch.start][step]]
            follows = None
            if has_trees and step:
                follows = self._index([last[s.start + s.before(s.length + i) - s.length] for s, i in rows])
            befores.append(follows)
            steps.append(slice(len(tokens), len(tokens) + len(rows)))
            places = [stretch.start + i for stretch, i in rows]
            last = {place: row for row, place in enumerate(places)} if has_trees else last
            tokens += places
        return steps, befores, tokens

    def _keep(self, rows: Mapping[int, int] | range) -> list[tuple[int, int]]:
        """Rows whose states are kept, in order, and their slots."""
        kept = []
        for stretch in self.stretches:
            count = self._num_new(stretch)
            new = range(max(0, count - stretch.snapshots.room), count)
            kept += [(rows[stretch.start + i], stretch.snapshots.slot_of(stretch.length + i)) for i in new]
        return sorted(kept)

    def _store(self, rows: Mapping[int, int] | range) -> list[tuple[int, int]]:
        """Rows whose states are stored with a prefix, in order, and the slots of these snapshots."""
        return sorted(
            (rows[stretch.start + i], slot) for stretch in self.stretches for i, slot in self._reserved(stretch)
        )

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
            steps = [slice(step.start - first, step.stop - first) for step in self._steps[begin:end]]
            befores = self._befores[begin:end]
            rows = slice(first, self._steps[end - 1].stop)
            kept, stored = (
                [(row - first, slot) for row, slot in pairs if rows.start <= row < rows.stop]
                for pairs in (self._kept, self._stored)
            )
            columns = [self._index([pair[i] for pair in pairs]) for pairs in (kept, stored) for i in (0, 1)]
            pieces.append(Passage(rows, steps, befores, *columns))
            begin = end
        return pieces

    def _look_back(self, width: int) -> Windows:
        back, has_trees = width - 1, any(len(stretch.tree) for stretch in self.stretches)
        before, kept, slots, stored, prefixes = (list[int]() for _ in range(5))
        windows, counts, first = list[range | list[int]](), list[int](), 0
        for stretch in self.stretches:
            snapshots, num_new = stretch.snapshots, self._num_new(stretch)
            earlier = _inputs_before(stretch, back)
            before += [snapshots.slot_of(place, back) for place in earlier]
            counts.append(len(earlier))
            first += len(earlier)
            windows += _windows(stretch, earlier, first, back)
            new = range(num_new)[-(snapshots.room + back - 1) :]
            kept += [stretch.start + i for i in new]
            slots += [snapshots.slot_of(stretch.length + i, back) for i in new]
            for token, slot in self._reserved(stretch):
                stored += range(first + token + 1 - back, first + token + 1)
                prefixes.append(slot)
            first += stretch.stop - stretch.start
        is_whole = has_trees or len(self.stretches) == 1
        return Windows(
            max(stretch.snapshots.num_slots(back) for stretch in self.stretches),
            self._index(before),
            counts,
            [self._index([window[i] for window in windows]) for i in range(width)]
            if has_trees
            else [slice(i, first - back + i) for i in range(width)],
            None if is_whole else self._index([window[0] for window in windows]),
            *map(self._index, (kept, slots, stored, prefixes)),
        )

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return sent(numbers, torch.int64, self._device)


def _levels(stretch: Stretch) -> list[list[int]]:
    """New tokens by how many others of them each one follows."""
    if not len(stretch.tree):
        return [[i] for i in range(stretch.stop - stretch.start)]
    levels, depths = list[list[int]](), list[int]()
    for i in range(stretch.stop - stretch.start):
        before = stretch.before(stretch.length + i) - stretch.length
        depths.append(0 if before < 0 else depths[before] + 1)
        if depths[-1] == len(levels):
            levels.append([])
        levels[depths[-1]].append(i)
    return levels


def _begin(stretch: Stretch, token: int) -> int:
    """The slot of the state that a new token continues, if no new token comes before it."""
    return stretch.snapshots.slot_of(stretch.before(stretch.length + token))


def _inputs_before(stretch: Stretch, count: int) -> list[int]:
    """Places of the last inputs before a stretch, negative ones before the text; before them, nodes of its tree."""
    last = range(stretch.length - count, stretch.length)
    if not len(stretch.tree):
        return list(last)
    new = range(stretch.length, stretch.length + stretch.stop - stretch.start)
    on_paths = {before for place in new for before in _path(stretch, place, count)}
    return [*sorted(place for place in on_paths if place < last.start), *last]


def _windows(stretch: Stretch, earlier: list[int], first: int, back: int) -> list[range | list[int]]:
    """For each new token, the numbers of its window's inputs among all inputs; new ones count from `first` on."""
    places = range(stretch.length, stretch.length + stretch.stop - stretch.start)
    if not len(stretch.tree):
        return [range(first + i - back, first + i + 1) for i in range(len(places))]
    number = {place: first - len(earlier) + i for i, place in enumerate(earlier)}
    number |= {place: first + i for i, place in enumerate(places)}
    return [[number[before] for before in (*_path(stretch, place, back), place)] for place in places]


def _path(stretch: Stretch, place: int, count: int) -> list[int]:
    """The places of the `count` tokens before the one at a place, the oldest first."""
    path: list[int] = []
    for _ in range(count):
        path.append(stretch.before(path[-1] if path else place))
    return path[::-1]
