"""How many tokens to draft: k for each row of a step, decided before anything is drafted or sampled.

`fixed` drafts what a request wants. `confidence` does too; there the draft itself stops where it is unsure (p_min).
`heuristic` goes by the last step's success, as Hugging Face's assisted generation does: two tokens more after a full
success, else one less. `adaptive` (its own file) learns how many pay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_MORE, _LESS = 2, 1  # tokens, by which `heuristic` changes k
CHANGING = ("adaptive", "heuristic")
"""Those that choose k step by step; a chain's length is what they change."""


@dataclass(frozen=True, slots=True)
class KSchedule:
    """k by a number: of the sequences that run together, or of a context's tokens.

    Args:
        default: k below the first entry.
        entries: (number, k), ascending; each holds from its number up to the next one's.
    """

    default: int
    entries: tuple[tuple[int, int], ...] = ()

    @classmethod
    def by_batch(cls, default: int, entries: Sequence[tuple[int, int]], disable_by_batch_size: int | None) -> KSchedule:
        """A schedule in which nothing is drafted above `disable_by_batch_size` sequences."""
        if disable_by_batch_size is None:
            return cls(default, tuple(entries))
        below = [entry for entry in entries if entry[0] <= disable_by_batch_size]
        return cls(default, (*below, (disable_by_batch_size + 1, 0)))

    @property
    def most(self) -> int:
        """The largest k that it can give."""
        return max([self.default, *(k for _, k in self.entries)])

    def k(self, number: int, own_k: int | None) -> int:
        """k of a request: its own if it has one, but within the entry that holds, if one does."""
        in_force = [k for first, k in self.entries if first <= number]
        if not in_force:
            return self.default if own_k is None else own_k
        return in_force[-1] if own_k is None else min(own_k, in_force[-1])

    def has_ended(self, number: int) -> bool:
        """Whether nothing is drafted at this number and at any larger one."""
        return self.k(number, None) == 0 and not any(k for first, k in self.entries if first > number)


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

    def choose(self, rows: Sequence[DecodingRow], is_pure: bool) -> list[int]:
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

    def choose(self, rows: Sequence[DecodingRow], is_pure: bool) -> list[int]:
        """Every row's most."""
        return [row.most for row in rows]

    def observe(self, seconds: float, given: Mapping[int, tuple[int, int]], draft_seconds: float = 0.0) -> None:
        """Nothing to learn."""

    def forget(self, handle: int) -> None:
        """Nothing to forget."""


class Heuristic:
    """A k for each sequence, from 1 to what its request wants, where it begins (`num_assistant_tokens_schedule`).

    It depends on the sequence's own results alone, so a text does not depend on its company.
    """

    def __init__(self) -> None:
        self._k: dict[int, int] = {}
        self._most: dict[int, int] = {}

    def choose(self, rows: Sequence[DecodingRow], is_pure: bool) -> list[int]:
        """Each sequence's k, at most what may be drafted for it."""
        for row in rows:
            self._most[row.handle] = max(self._most.get(row.handle, 1), row.most)
            self._k.setdefault(row.handle, max(row.most, 1))
        return [min(self._k[row.handle], row.most) for row in rows]

    def observe(self, seconds: float, given: Mapping[int, tuple[int, int]], draft_seconds: float = 0.0) -> None:
        """Two more where all drafted tokens were accepted, one less where one was refused."""
        for handle, (num_drafted, num_accepted) in given.items():
            if num_drafted and handle in self._k:
                change = _MORE if num_accepted == num_drafted else -_LESS
                self._k[handle] = max(1, min(self._k[handle] + change, self._most[handle]))

    def forget(self, handle: int) -> None:
        """A sequence ended, or begins again."""
        self._k.pop(handle, None)
        self._most.pop(handle, None)
