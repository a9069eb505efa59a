"""Snapshots of a sequence's state: after which of its last tokens recurrent layers keep what they carry on.

Keys of a rejected token are left behind; a recurrence has mixed that token into everything. So the state after each of
the last tokens is kept, in as many slots, which take turns. Slot 0 is the state before a text: zeros, for all.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Snapshots:
    """The slots of one sequence.

    Args:
        place: among the sequences; its slots lie behind those of the places before.
        room: how many states are kept.
        oldest: the shortest length after which the state may still be there.
    """

    place: int
    room: int
    oldest: int = 0

    def slot(self, length: int) -> int:
        """Where the state after so many tokens is kept."""
        return 1 + self.place * self.room + length % self.room if length else 0

    def restorable(self, length: int) -> int:
        """How many of so many cached tokens a recurrence need not read again: all of them, or none."""
        if length < self.oldest:
            length = self.oldest = 0
        return length

    def make_room(self, length: int) -> None:
        """A text will be so long: older states give way, whether the forward then succeeds or not."""
        self.oldest = max(self.oldest, length - self.room + 1)


def num_snapshots(num_drafted: int) -> int:
    """States kept of a sequence: a draft of so many tokens may be refused from its first one on."""
    return max(num_drafted, 1) + 1
