"""The layout of a packed forward: its tokens, where each stands, what it reads and where it is written.

A forward's tokens are those that the cache lacks of all its rows, one row after another. `Layouts` makes the layout
from what each row feeds (`ForwardInput`); the forwards of `lm.forward` run it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_cli.drafted import MOST_NODES, NOTHING, Drafted
from specdec_cli.lm.cache.contexts import CachedSequence, ForwardInput
from specdec_cli.lm.cache.snapshots import Snapshots
from specdec_cli.lm.hidden_states import HiddenStates
from specdec_cli.transfer import sent

# Attention reads keys in multiples of this many where bits matter: a query's key count then follows from its position
# alone, and a sum over more masked keys need not round alike.
KEY_GRAIN = 64
# More pieces to write than this go through one indexed copy.
MAX_PIECES = 8
# Rows of one forward that the promise of equal bits covers (`lm.invariance` tries as many).
MOST_ROWS = 64


@dataclass(slots=True)
class Span:
    """Neighbouring queries of one sequence that attend together.

    Args:
        start: the first query's place among the forward's tokens.
        stop: one behind the last query's place.
        num_keys: how many keys they read, from position 0 on; masks hide those behind a query.
        first_slot: where the keys begin, when they lie in one piece.
        slots: slot of every key [num_keys] int64, when they do not.
        position: the first query's position in its sequence.
        num_in_order: how many first keys lie as the sequence's blocks do; a drafted node's are then those of its path.
    """

    start: int
    stop: int
    num_keys: int
    first_slot: int
    slots: Tensor | None
    position: int = 0
    num_in_order: int = sys.maxsize


@dataclass(frozen=True, slots=True)
class DraftedNodes:
    """Drafted trees among the tokens of a recorded forward, on its device: where nodes stand and what they see.

    A chain's nodes are text like any other: of them nothing differs.

    Args:
        places: of each fed token in its sequence's blocks [B, R] int64; negative where it only fills the shape.
        key_positions: the position in its text of the key at each place [B, T] int64.
        is_seen: whether a tree lets a token look at a place: at text and at its own path alone [B, R, T] bool.
    """

    places: Tensor
    key_positions: Tensor
    is_seen: Tensor

    @classmethod
    def among(
        cls, places: Tensor, positions: Tensor, ancestors: Tensor, num_text: Tensor, num_keys: int
    ) -> DraftedNodes:
        """The nodes among fed tokens, by computations on the device alone.

        Args:
            places: of each token [B, R].
            positions: of each token in its text [B, R].
            ancestors: of each node as a 64-bit mask [B, R]; 0 for text.
            num_text: places before each sequence's nodes [B].
            num_keys: T, places that are read.
        """
        every = torch.arange(num_keys, device=places.device)
        # A token that only fills the shape writes position 0 to place 0, where it stands anyway.
        key_positions = every.expand(len(places), -1).scatter(1, places.clamp(min=0), positions.clamp(min=0))
        is_ancestor = (ancestors[:, :, None] >> torch.arange(MOST_NODES, device=places.device) & 1).bool()
        # Before the nodes is text, behind them nothing.
        sees = F.pad(F.pad(is_ancestor, (1, 0), value=True), (0, 1), value=False)
        node = (every - num_text[:, None] + 1).clamp(0, MOST_NODES + 1)
        is_seen = sees.gather(2, node[:, None].expand(-1, places.shape[1], -1))
        return cls(places, key_positions, is_seen)


@dataclass(slots=True)
class Stretch:
    """Tokens of one sequence, which a recurrence reads one after another; each node of a drafted tree after its parent.

    Args:
        start: the first token's place in the forward.
        stop: one behind the last one's.
        length: places of the sequence before them.
        snapshots: where its states are kept.
        num_text: places before the tree.
        tree: its nodes, where they are no chain.
    """

    start: int
    stop: int
    length: int
    snapshots: Snapshots
    num_text: int = 0
    tree: Drafted = NOTHING

    def before(self, place: int) -> int:
        """The place in the sequence of the token that the one at a place follows; -1 begins a text."""
        node = place - self.num_text
        return self.num_text + self.tree.parents[node] if 0 <= node < len(self.tree) else place - 1


@dataclass
class Layout:
    """One forward pass: n tokens of several sequences.

    Args:
        tokens: what is fed; empty where the device alone knows it (`lm.forward.graphs`).
        positions: each token's position in its own sequence.
        spans: the queries, in order; together they cover all n tokens.
        pieces: (start, stop, slot): tokens start..stop-1 are written to slot, slot+1, ...
        wanted: places among the tokens of those with wanted logits.
        num_written: the first so many tokens are written (a padding token is not).
        is_bitwise: attention must give a row the same bits in whatever company.
        device: where the forward runs.
        kernels: what attends all sequences at once (`lm.split_attention`); None where spans are taken one by one.
        slots: of a recorded forward, those of the keys at every place of every sequence [B, T] int64.
        nodes: of a recorded forward, the drafted trees among its tokens; None where all are text.
        stretches: the tokens of each sequence, for layers that carry a state; empty for a model without any.
        is_tapped: hidden states are wanted.
        states: of the written tokens [num_written, taps, hidden], where they were wanted and the forward has run.
    """

    tokens: list[int]
    positions: list[int]
    spans: list[Span]
    pieces: list[tuple[int, int, int]]
    wanted: list[int]
    num_written: int
    is_bitwise: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kernels: Any = None
    slots: Tensor | None = None
    nodes: DraftedNodes | None = None
    stretches: list[Stretch] = field(default_factory=list)
    is_tapped: bool = False
    states: HiddenStates | None = None

    @cached_property
    def position_ids(self) -> Tensor:
        """The positions [1, n] int64."""
        return sent([self.positions], torch.int64, self.device)

    @cached_property
    def key_positions(self) -> Tensor:
        """Positions of the longest span's keys [T] int64."""
        return torch.arange(max(span.num_keys for span in self.spans), device=self.device)

    def part(self, start: int, stop: int) -> Layout:
        """The layout of some neighbouring tokens, to write them alone: without spans and logits."""
        pieces = [
            (max(begin, start) - start, min(end, stop) - start, slot + max(start - begin, 0))
            for begin, end, slot in self.pieces
            if begin < stop and end > start
        ]
        tokens, positions = self.tokens[start:stop], self.positions[start:stop]
        return Layout(tokens, positions, [], pieces, [], stop - start, device=self.device)

    @cached_property
    def joined_key_positions(self) -> Tensor:
        """The position in its sequence of each of all spans' keys, one span after the other [T] int64."""
        return torch.cat([torch.arange(span.num_keys, device=self.device) for span in self.spans])

    @cached_property
    def write_slots(self) -> Tensor | None:
        """Slot of every written token [num_written] int64; None when there are few pieces."""
        if len(self.pieces) <= MAX_PIECES:
            return None
        slots = [slot + i for start, stop, slot in self.pieces for i in range(stop - start)]
        return sent(slots, torch.int64, self.device)


class JoinedKeys(int):
    """How many keys all spans of a layout read, for a forward that is handed them joined."""

    layout: Layout

    def __new__(cls, layout: Layout) -> JoinedKeys:
        """The number of keys, with the layout beside it."""
        joined = super().__new__(cls, sum(span.num_keys for span in layout.spans))
        joined.layout = layout
        return joined


@dataclass(frozen=True, slots=True)
class Layouts:
    """Makes layouts over a cache of blocks.

    Args:
        block_size: tokens in a block.
        device: where the forward runs.
        is_bitwise: attention must give a row the same bits in any company.
        has_company: a token alone in a forward is fed twice, because one row takes another kernel than two or more.
        rows_together: how many rows, of `MOST_ROWS`, keep their bits in one forward.
    """

    block_size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_bitwise: bool = False
    has_company: bool = False
    rows_together: int = MOST_ROWS

    def score(self, feeds: Sequence[ForwardInput], run: Callable[[Layout], Tensor], vocab_size: int) -> Tensor:
        """Logits [n, V] of as many forwards as the feeds take; feeds that want hidden states are given them.

        Args:
            feeds: in order.
            run: one forward; puts hidden states into a layout that wants them.
            vocab_size: V.
        """
        is_tapped = any(feed.is_tapped for feed in feeds)
        logits, states = [], list[HiddenStates]()
        for together in self._forwards(feeds):
            layout = self.of(together)
            layout.is_tapped = is_tapped
            logits.append(run(layout))
            if layout.states is not None:
                states.append(layout.states)
        if states:
            whole = states[0] if len(states) == 1 else HiddenStates.of(torch.cat([part.tensor() for part in states]))
            begin = 0
            for feed in feeds:
                end = begin + feed.num_tokens
                feed.states = whole.part(begin, end) if feed.is_tapped else None
                begin = end
        if not logits:
            return torch.empty(0, vocab_size, device=self.device)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _forwards(self, feeds: Sequence[ForwardInput]) -> list[list[ForwardInput]]:
        """The feeds of each forward: of as many as keep every row's bits, and of one if no bits are promised."""
        total = sum(feed.num_tokens for feed in feeds)
        left = [feed for feed in feeds if feed.num_tokens]
        if not self.rows_together < total <= MOST_ROWS:
            return [left] if left else []
        most = -(-total // -(-total // self.rows_together))
        forwards: list[list[ForwardInput]] = []
        while left:
            together, room = [], most
            while left and room:
                first, *rest = left.pop(0).cut(room)
                together.append(first)
                room -= first.num_tokens
                left[:0] = rest
            forwards.append(together)
        return forwards

    def of(self, feeds: Sequence[ForwardInput]) -> Layout:
        """The layout of one forward."""
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        spans: list[Span] = []
        pieces: list[tuple[int, int, int]] = []
        stretches: list[Stretch] = []
        for feed in feeds:
            start = len(tokens)
            tokens += feed.context[feed.keep :]
            positions += feed.positions
            wanted += range(len(tokens) - feed.num_logits, len(tokens))
            spans += self._spans(feed, start)
            if feed.tree:
                spans += self._node_spans(feed, start)
            pieces += self._pieces(feed, start)
            if feed.sequence.snapshots is not None:
                ends = start, len(tokens), feed.keep
                stretches.append(Stretch(*ends, feed.sequence.snapshots, feed.num_text, feed.tree))
        num_written = len(tokens)
        if self.has_company and num_written == 1:
            tokens, positions = tokens * 2, positions * 2
            spans[0].stop += 1
            for stretch in stretches:
                stretch.stop += 1
        return Layout(
            tokens,
            positions,
            spans,
            pieces,
            wanted,
            num_written,
            self.is_bitwise,
            self.device,
            stretches=stretches,
        )

    def _spans(self, feed: ForwardInput, start: int) -> Iterator[Span]:
        """A row's queries; where bits matter, cut wherever the number of keys that they read grows by a grain."""
        length, keep = min(len(feed.context), feed.num_text), feed.keep
        grain = KEY_GRAIN if self.is_bitwise else length
        sequence = feed.sequence
        slots = None if sequence.in_one_piece else self._slots(sequence, -(-length // grain) * grain)
        first_slot = sequence.blocks[0] * self.block_size
        while keep < length:
            num_keys = (keep // grain + 1) * grain
            stop = min(length, num_keys)
            offset = start - feed.keep
            read = None if slots is None else slots[:num_keys]
            yield Span(offset + keep, offset + stop, num_keys, first_slot, read, keep)
            keep = stop

    def _node_spans(self, feed: ForwardInput, start: int) -> Iterator[Span]:
        """A drafted tree's nodes, each alone: it reads the text and its path, in the order that a chain's keys have."""
        grain = KEY_GRAIN if self.is_bitwise else 1
        slots = self._slots(feed.sequence, len(feed.context))
        for place in range(max(feed.keep, feed.num_text), len(feed.context)):
            position = feed.position(place)
            path = [feed.num_text + node for node in feed.tree.path(place - feed.num_text)]
            num_padded = -(position + 1) % grain
            read = torch.cat(
                (slots[: feed.num_text], slots[sent(path + path[-1:] * num_padded, torch.int64, self.device)])
            )
            query = start + place - feed.keep
            yield Span(query, query + 1, position + 1 + num_padded, 0, read, position, feed.num_text)

    def _slots(self, sequence: CachedSequence, num_keys: int) -> Tensor:
        """Slots of a scattered sequence's first `num_keys` positions [num_keys] int64; any slot beyond its end."""
        blocks = sent(sequence.blocks, torch.int64, self.device)
        slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size, device=self.device)).flatten()
        slots = slots[:num_keys]
        return torch.cat((slots, slots[:1].expand(num_keys - len(slots))))

    def _pieces(self, feed: ForwardInput, start: int) -> Iterator[tuple[int, int, int]]:
        """Where a row's new keys go, as (start, stop, slot) over the forward's tokens."""
        size, length, blocks = self.block_size, len(feed.context), feed.sequence.blocks
        offset = start - feed.keep
        if feed.sequence.in_one_piece:
            yield start, offset + length, blocks[0] * size + feed.keep
            return
        position = feed.keep
        while position < length:
            stop = min(length, (position // size + 1) * size)
            yield offset + position, offset + stop, blocks[position // size] * size + position % size
            position = stop
