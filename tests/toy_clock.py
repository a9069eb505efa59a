"""A clock of our own for tests of measuring commands: what they find depends on no machine and no load."""

from __future__ import annotations

import sys
import time

import pytest


class Clock:
    """A clock that runs when somebody sleeps, and a microsecond whenever it is looked at: no load is in it."""

    def __init__(self) -> None:
        self.now = 0.0

    def look(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def toy_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Make it everybody's clock until the test ends."""
    clock, real = Clock(), time.perf_counter
    monkeypatch.setattr(time, "sleep", clock.sleep)
    monkeypatch.setattr(time, "perf_counter", clock.look)
    for name, module in list(sys.modules.items()):
        if name.startswith("specdec_cli.") and getattr(module, "perf_counter", None) is real:
            monkeypatch.setattr(module, "perf_counter", clock.look)
    return clock
