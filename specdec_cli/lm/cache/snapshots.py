"""Snapshots of a sequence's state: after which of its last tokens recurrent layers keep what they carry on.

Keys of a rejected token are left behind; a recurrence has mixed that token into everything. So the state after each of
the last tokens is kept, in as many slots, which take turns. Slot 0 is the state before a text: zeros, for all. What a
convolution carries on are its last inputs, `width` of them; a state is a width of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Snapshots:
    """The slots of one sequence.

    Args:
        place: among the sequences; its slots lie behind those of the places before.
        room: how many states are kept.
        oldest: the shortest length after which the state may still be there.
        reserved: lengths after which the state is stored for others to share, and its slot there (`prefix_states`).
    """

    place: int
    room: int
    oldest: int = 0
    reserved: dict[int, int] = field(default_factory=dict)

    def slot(self, length: int) -> int:
        """Where the state after so many tokens is kept."""
        return self.slot_of(length - 1)

    def slot_of(self, token: int, width: int = 1) -> int:
        """Where the state after a token is kept, or that token's input of a convolution; 0 before the text."""
        room = self.room + width - 1
        return 1 + self.place * room + token % room if token >= 0 else 0

    def num_slots(self, width: int = 1) -> int:
        """Slots up to this sequence's last one."""
        return 1 + (self.place + 1) * (self.room + width - 1)

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
