"""Watches the acceptance of a server and compares each window of drafted tokens with those before it.

Acceptance far below its own history points to garbled output or a draft that lost its state, far above it to text that
repeats itself. Neither changes a status code or a latency.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import Literal

WINDOW_TOKENS = 2000
"""Drafted tokens of a window: with one acceptance, its rate varies by about 1 %."""
MIN_WINDOWS = 8
"""Windows of history before any is judged."""
_WEIGHT = 0.1  # of the newest window in the history, which so forgets what is some tens of windows old
_LASTING = 20  # unusual windows in a row, after which they are the new history
_DEVIATIONS, _DIFFERENCE = 4.0, 0.15  # both must be exceeded: traffic that varies, and traffic that hardly does

Direction = Literal["low", "high"]


@dataclass(slots=True)
class AcceptanceWatch:
    """The acceptance rate of the current window, and its mean and spread over earlier ones.

    Attributes:
        recent: rate of the last whole window; None before it.
        usual: mean rate of earlier windows; None until there are enough of them.
        num_alarms: windows that were far off, by direction.
        state: direction of the last window; None while acceptance is usual.
    """

    recent: float | None = None
    num_alarms: dict[Direction, int] = field(default_factory=lambda: {"low": 0, "high": 0})
    state: Direction | None = None
    _num_windows: int = 0
    _num_unusual: int = 0
    _mean: float = 0.0
    _variance: float = 0.0
    _drafted: int = 0
    _accepted: int = 0

    @property
    def usual(self) -> float | None:
        """Mean rate of earlier windows; None until there are enough of them."""
        return self._mean if self._num_windows >= MIN_WINDOWS else None

    def add(self, drafted: int, accepted: int) -> str | None:
        """Count a step; gives a sentence for the log when acceptance leaves its usual range or returns to it."""
        self._drafted += drafted
        self._accepted += accepted
        if self._drafted < WINDOW_TOKENS:
            return None
        rate, self._drafted, self._accepted = self._accepted / self._drafted, 0, 0
        before, usual, self.recent = self.state, self.usual, rate
        self.state = None if usual is None else self._direction(rate, usual)
        if self.state is None:
            self._num_unusual = 0
            self._remember(rate)
        else:
            self.num_alarms[self.state] += 1
            self._num_unusual += 1
        if self._num_unusual == _LASTING:
            self._num_windows, self._mean, self._variance, self._num_unusual = 0, 0.0, 0.0, 0
        return None if usual is None or self.state == before else _sentence(self.state, rate, usual)

    def _direction(self, rate: float, usual: float) -> Direction | None:
        if abs(rate - usual) <= max(_DIFFERENCE, _DEVIATIONS * sqrt(self._variance)):
            return None
        return "low" if rate < usual else "high"

    def _remember(self, rate: float) -> None:
        """Update mean and variance: exactly for the first windows, with a fixed weight for later ones."""
        self._num_windows += 1
        weight = max(_WEIGHT, 1 / self._num_windows)
        change = rate - self._mean
        self._mean += weight * change
        self._variance = (1 - weight) * (self._variance + weight * change**2)


def _sentence(state: Direction | None, rate: float, usual: float) -> str:
    rates = f"{rate:.0%} of the last {WINDOW_TOKENS} drafted tokens were accepted, usually {usual:.0%}"
    if state is None:
        return f"acceptance is usual again: {rates}"
    looks = {
        "low": "garbled output and a draft that lost its state look like this, and so does another kind of request",
        "high": "output that repeats itself looks like this, and so does another kind of request",
    }
    return f"acceptance is unusually {state}: {rates}; {looks[state]}"
