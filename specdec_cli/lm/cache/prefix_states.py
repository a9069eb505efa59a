"""Snapshots of the states at the ends of cached prefixes: which slot holds which, and which gives way to a new one.

A prefix of a stateful model can be shared where the state after it was stored beside its keys and values: at the ends
of every `interval` tokens, and at the last whole block of a prompt. A snapshot is found by the key of its prefix's last
block. A sequence that adopts one gets a copy, so that neither changes the other.
"""

from __future__ import annotations

from collections.abc import Iterable


class PrefixStates:
    """Slots of snapshots.

    Args:
        num_slots: snapshots in all; 0 shares nothing.
        interval: tokens between two that are stored of a text.
    """

    def __init__(self, num_slots: int, interval: int) -> None:
        self.num_slots, self.interval = num_slots, interval
        self._free = list(range(num_slots))
        self._by_key: dict[bytes, int] = {}  # the least recently used one first

    def reserve(self) -> int | None:
        """A slot for a new snapshot, if need be that of the least recently used; None where all wait for theirs."""
        if not self._free and self._by_key:
            self.forget(next(iter(self._by_key)))
        return self._free.pop() if self._free else None

    def store(self, key: bytes, slot: int) -> None:
        """Make the snapshot in a reserved slot findable; where another is under this key already, that one stays."""
        if key in self._by_key:
            self._free.append(slot)
        else:
            self._by_key[key] = slot

    def give_back(self, slots: Iterable[int]) -> None:
        """Return reserved slots without a snapshot."""
        self._free += slots

    def use(self, key: bytes) -> int:
        """The slot of a snapshot that there is; it becomes the most recently used one."""
        slot = self._by_key[key] = self._by_key.pop(key)
        return slot

    def forget(self, key: bytes) -> None:
        """Give up the snapshot of a prefix that can no longer be found, if there is one."""
        slot = self._by_key.pop(key, None)
        if slot is not None:
            self._free.append(slot)

    def check(self, reserved: Iterable[int]) -> None:
        """Assert that each slot is free, reserved, or holds one snapshot."""
        slots = sorted([*self._free, *reserved, *self._by_key.values()])
        assert slots == list(range(self.num_slots)), "free + used slots of snapshots differ from the total"

    def __contains__(self, key: bytes) -> bool:
        """Whether there is a snapshot under a key."""
        return key in self._by_key
