"""How long a wait has taken and how long it still takes, in words; and when a plain stream gets its next line."""

from __future__ import annotations

from time import perf_counter

SECONDS_BETWEEN_LINES = 15.0
"""Where no live area can be drawn."""


class Pace:
    """Elapsed and remaining time of one piece of work, from when it is made."""

    def __init__(self) -> None:
        self._begin = self._last = perf_counter()

    def is_due(self) -> bool:
        """Whether the next line is due; asking starts the next pause."""
        now = perf_counter()
        if now < self._last + SECONDS_BETWEEN_LINES:
            return False
        self._last = now
        return True

    def words(self, done: int = 0, total: int = 0) -> str:
        """`40 s elapsed, about 2 min left`; without a count only the elapsed time."""
        elapsed = perf_counter() - self._begin
        said = f"{_duration(elapsed)} elapsed"
        return f"{said}, about {_duration(elapsed / done * (total - done))} left" if 0 < done < total else said


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
