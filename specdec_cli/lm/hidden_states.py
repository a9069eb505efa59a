"""Hidden states of a forward, each row's cut out once they are read: a small model's step would feel the cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROOM_ROWS = 32


@dataclass(slots=True)
class HiddenStates:
    """Those of neighbouring tokens, a part of a larger tensor that is not written again.

    Args:
        whole: [tokens, taps, hidden].
        begin: the first of its rows that belongs to these.
        end: the row behind the last.
    """

    whole: Tensor
    begin: int
    end: int

    @classmethod
    def of(cls, whole: Tensor) -> HiddenStates:
        """All of a tensor."""
        return cls(whole, 0, len(whole))

    def __len__(self) -> int:
        return self.end - self.begin

    def part(self, begin: int, end: int) -> HiddenStates:
        """Those from one place among these to another."""
        if not begin and end == self.end - self.begin:
            return self
        return HiddenStates(self.whole, self.begin + begin, self.begin + end)

    def chosen(self, places: Sequence[int]) -> HiddenStates:
        """Those at some places; the first ones are not copied. The host waits for no GPU, as with an index it would."""
        if list(places) == list(range(len(places))):
            return self.part(0, len(places))
        return HiddenStates.of(torch.cat([self.part(place, place + 1).tensor() for place in places]))

    def joined(self, other: HiddenStates) -> HiddenStates | None:
        """These and others as one; None where the others do not stand behind these in the same tensor."""
        if other.whole is not self.whole or other.begin != self.end:
            return None
        return HiddenStates(self.whole, self.begin, other.end)

    def tensor(self) -> Tensor:
        """[tokens, taps, hidden]."""
        return self.whole[self.begin : self.end]


class HiddenRoom:
    """Room for the states of forwards to come, each row written once: many forwards of a token share an allocation.

    Args:
        num_taps: states of a token.
        width: numbers of a state, float32.
    """

    def __init__(self, num_taps: int, width: int) -> None:
        self._num_taps, self._width = num_taps, width
        self._whole = torch.empty(0, num_taps, width)
        self._size = self._used = self._address = 0

    def take(self, num_tokens: int) -> tuple[HiddenStates, int]:
        """Rows for so many tokens, and their address."""
        if self._used + num_tokens > self._size:
            self._size, self._used = max(num_tokens, _ROOM_ROWS), 0
            self._whole = torch.empty(self._size, self._num_taps, self._width)
            self._address = self._whole.data_ptr()
        begin, self._used = self._used, self._used + num_tokens
        return HiddenStates(self._whole, begin, self._used), self._address + 4 * begin * self._num_taps * self._width
