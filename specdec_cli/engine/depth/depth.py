"""How many tokens to draft: k for each row of a step, decided before anything is drafted or sampled.

`fixed` drafts what a request wants. `confidence` does too; there the draft itself stops where it is unsure (p_min).
`adaptive` (its own file) learns how many pay; `heuristic` (likewise) goes by the last step's success.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

POLICIES = ("fixed", "confidence", "adaptive", "heuristic")
CHANGING = ("adaptive", "heuristic")
"""Those that choose k step by step; a chain's length is what they change."""


@dataclass(frozen=True, slots=True)
class KByBatch:
    """k by how many sequences run together.

    Args:
        default: k below the first entry.
        entries: (number of sequences, k), ascending; each holds from its number up to the next one's.
    """

    default: int
    entries: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, default: int, entries: Sequence[tuple[int, int]], disable_by_batch_size: int | None) -> KByBatch:
        """A table in which nothing is drafted above `disable_by_batch_size` sequences."""
        if disable_by_batch_size is None:
            return cls(default, tuple(entries))
        below = [entry for entry in entries if entry[0] <= disable_by_batch_size]
        return cls(default, (*below, (disable_by_batch_size + 1, 0)))

    @property
    def most(self) -> int:
        """The largest k that it can give."""
        return max([self.default, *(k for _, k in self.entries)])

    def k(self, num_running: int, wish: int | None) -> int:
        """k of a request: its own wish if it has one, but within the entry that holds, if one does."""
        held = [k for size, k in self.entries if size <= num_running]
        if not held:
            return self.default if wish is None else wish
        return held[-1] if wish is None else min(wish, held[-1])


@dataclass(slots=True)
class DecodingRow:
    """A row that decodes in a step.

    Args:
        handle: its sequence.
        drafter: by name.
        most: tokens that may be drafted for it.
        length: its tokens so far, prompt included.
        left: tokens that it may still emit.
    """

    handle: int
    drafter: str
    most: int
    length: int
    left: int = 1 << 30


class DepthPolicy(Protocol):
    """Chooses k for the rows of a step and learns from the result."""

    def choose(self, wishes: Sequence[DecodingRow], is_pure: bool) -> list[int]:
        """k for each row, at most its `most`; the step is pure when no prompt is fed in it."""
        ...

    def observe(self, seconds: float, given: Mapping[int, tuple[int, int]], draft_seconds: float = 0.0) -> None:
        """The last step: its time, the drafts' part of it, and what each sequence that goes on drafted and accepted."""
        ...

    def forget(self, handle: int) -> None:
        """A sequence ended, or was preempted and will be read again by its drafts."""
        ...


class Fixed:
    """As many as each request wants."""

    def choose(self, wishes: Sequence[DecodingRow], is_pure: bool) -> list[int]:
        """Every row's most."""
        return [wish.most for wish in wishes]

    def observe(self, seconds: float, given: Mapping[int, tuple[int, int]], draft_seconds: float = 0.0) -> None:
        """Nothing to learn."""

    def forget(self, handle: int) -> None:
        """Nothing to forget."""
