"""How busy the machine is; for a measurement's document."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

_BUSY_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Load:
    """Runnable processes at one moment.

    Args:
        average: of the last minute.
        num_cores: cores that this process may use.
    """

    average: float
    num_cores: int

    @property
    def busy(self) -> str | None:
        """A sentence when something else is running."""
        if self.average <= _BUSY_SHARE * self.num_cores:
            return None
        cores = f"{self.num_cores} cores"
        return f"the machine is busy: load {self.average:.1f} on {cores}; times measured now are not its own"

    def since(self) -> dict[str, float | int | str | None]:
        """How busy the machine was at this moment, and now."""
        return {
            "load_before": self.average,
            "load_after": psutil.getloadavg()[0],
            "num_cores": self.num_cores,
            "busy": self.busy,
        }


def look_at_load() -> Load:
    """The load now."""
    return Load(psutil.getloadavg()[0], num_cores())


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
