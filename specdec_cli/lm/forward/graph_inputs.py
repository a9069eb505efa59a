"""The inputs of a recorded forward: a bucket's shape, and the vector of integers that differs from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec_cli.drafted import MOST_NODES
from specdec_cli.lm.cache.contexts import ForwardInput
from specdec_cli.lm.cache.pending_tokens import shifted

NOTHING = -1
"""A place, a position or a block that only fills the shape."""
_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64, 65)
MOST_TOKENS = _TOKENS[-1]
"""Tokens of one sequence that a graph is made for."""
MOST_READ = 8
"""Text of one sequence that a graph reads for a step alone. More is a prompt's: all others would be padded to that."""
_FEWEST_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a graph.

    Args:
        num_rows: B, sequences.
        num_tokens: R, tokens of each that are fed.
        num_blocks: N, blocks of each one's cache that are read.
    """

    num_rows: int
    num_tokens: int
    num_blocks: int

    @classmethod
    def around(cls, num_rows: int, num_tokens: int, num_blocks: int) -> Bucket:
        """The smallest one that holds so many; of each sequence at most `MOST_TOKENS` tokens."""
        most_tokens = next(size for size in _TOKENS if size >= num_tokens)
        if num_rows * most_tokens == 1:
            most_tokens = 2  # a product of one row would take another kernel, and give other bits
        sizes = (size << i for i in count() for size in (_FEWEST_BLOCKS, _FEWEST_BLOCKS * 3 // 2))
        blocks = next(size for size in sizes if size >= num_blocks)
        return cls(1 << (num_rows - 1).bit_length(), most_tokens, blocks)

    @property
    def num_fed(self) -> int:
        """B·R, tokens of all sequences."""
        return self.num_rows * self.num_tokens


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """A step's inputs, all int64 and views of one vector.

    Args:
        tokens: [B, R]; negative numbers stand for unread ones.
        places: of each token in its sequence's blocks [B, R].
        positions: of each token in its text [B, R]; a drafted node's differs from its place.
        ancestors: of each drafted node as a 64-bit mask [B, R]; 0 for text.
        num_text: places before each sequence's drafted nodes [B].
        tables: blocks of each sequence [B, N].
        more: one more number for each token [B·R].
    """

    tokens: Tensor
    places: Tensor
    positions: Tensor
    ancestors: Tensor
    num_text: Tensor
    tables: Tensor
    more: Tensor

    @classmethod
    def views(cls, bucket: Bucket, vector: Tensor) -> GraphInputs:
        """The parts of a vector that `values` filled."""
        fed, rows = bucket.num_fed, bucket.num_rows
        parts = torch.split(vector, [fed, fed, fed, fed, rows, rows * bucket.num_blocks, fed])
        by_row = (rows, bucket.num_tokens)
        tokens, places, positions, ancestors = (part.view(by_row) for part in parts[:4])
        return cls(tokens, places, positions, ancestors, parts[4], parts[5].view(rows, bucket.num_blocks), parts[6])

    def leave_out(self, row: int) -> None:
        """Make a sequence one that only fills the shape, but for its blocks; the device is not waited for."""
        for each, nothing in (self.tokens, 0), (self.places, NOTHING), (self.positions, NOTHING), (self.ancestors, 0):
            each[row].fill_(nothing)
        self.num_text[row].fill_(1)


def values(
    bucket: Bucket,
    feeds: Sequence[ForwardInput],
    counts: Sequence[int],
    more: Sequence[int],
    shifts: Sequence[int] | None = None,
) -> list[int]:
    """A step's inputs one after another, as `GraphInputs.views` takes them apart.

    Args:
        bucket: holds them.
        feeds: of each sequence; none makes a vector that only fills the shape.
        counts: how many first tokens of each are fed.
        more: at most one number for each token.
        shifts: of each sequence, how many unread tokens of other guesses stand before those of its own; None has none.
    """
    tokens: list[int] = []
    places: list[int] = []
    positions: list[int] = []
    ancestors: list[int] = []
    tables: list[int] = []
    for feed, num, shift in zip(feeds, counts, shifts or [0] * len(feeds), strict=True):
        missing = bucket.num_tokens - num
        nothing = [NOTHING] * missing
        tokens += [*shifted(feed.context[feed.keep : feed.keep + num], shift), *[0] * missing]
        places += [*range(feed.keep, feed.keep + num), *nothing]
        positions += [*feed.positions[:num], *nothing]
        ancestors += [*map(_signed, feed.ancestors[:num]), *[0] * missing]
        tables += [*feed.sequence.blocks, *[NOTHING] * (bucket.num_blocks - len(feed.sequence.blocks))]
    rows = bucket.num_rows - len(feeds)
    fed = rows * bucket.num_tokens
    # What only fills the shape reads the first place, which is text.
    num_text = [*(feed.num_text for feed in feeds), *[1] * rows]
    return [
        *tokens, *[0] * fed,
        *places, *[NOTHING] * fed,
        *positions, *[NOTHING] * fed,
        *ancestors, *[0] * fed,
        *num_text,
        *tables, *[NOTHING] * (rows * bucket.num_blocks),
        *more, *[0] * (bucket.num_fed - len(more)),
    ]  # fmt: skip


def fill(vector: Tensor, values: Sequence[float] | npt.NDArray[np.float64]) -> None:
    """Send values to a vector of the device, without waiting for it."""
    pinned = torch.tensor(values, dtype=vector.dtype, pin_memory=vector.is_cuda)
    vector.copy_(pinned, non_blocking=True)


def _signed(mask: int) -> int:
    """A 64-bit mask as the int64 with the same bits."""
    return mask - (1 << MOST_NODES) if mask >> (MOST_NODES - 1) else mask
