"""The heuristic depth of Hugging Face's assisted generation: two tokens more after a full success, else one less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdec_cli.engine.depth.depth import DecodingRow

_MORE, _LESS = 2, 1


class Heuristic:
    """A k for each sequence, from 1 to what its request wants, where it begins (`num_assistant_tokens_schedule`).

    It depends on the sequence's own results alone, so a text does not depend on its company.
    """

    def __init__(self) -> None:
        self._k: dict[int, int] = {}
        self._most: dict[int, int] = {}

    def choose(self, wishes: Sequence[DecodingRow], is_pure: bool) -> list[int]:
        """Each sequence's k, at most what may be drafted for it."""
        for wish in wishes:
            self._most[wish.handle] = max(self._most.get(wish.handle, 1), wish.most)
            self._k.setdefault(wish.handle, max(wish.most, 1))
        return [min(self._k[wish.handle], wish.most) for wish in wishes]

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
