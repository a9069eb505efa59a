"""How busy the machine is, and was while passes were measured; for a measurement's document."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import psutil

from specdec_cli.measure.machine.interruption import INTERRUPTED_SHARE

_BUSY_SHARE = 0.25
_OVERLOADED = 1.5  # of the cores: more than the runs of this program that came before leave behind
_FEW = 0.25  # of the passes: medians are not concerned


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
        return f"the machine is busy: {self.words}; times measured now are unreliable"

    @property
    def is_overloaded(self) -> bool:
        """Whether so much is running that something has to wait."""
        return self.average > _OVERLOADED * self.num_cores

    @property
    def words(self) -> str:
        """The load beside the cores that are there for it."""
        return f"load {self.average:.1f} on {self.num_cores} cores"

    def since(self) -> dict[str, float | int | str | None]:
        """How busy the machine was at this moment, and now."""
        return {
            "load_before": self.average,
            "load_after": psutil.getloadavg()[0],
            "num_cores": self.num_cores,
            "busy": self.busy,
        }


class CountedPass(Protocol):
    """A pass whose time counts: its seconds, and what other programs cost of them."""

    @property
    def seconds(self) -> float:
        """Time that it took."""

    @property
    def lost_share(self) -> float | None:
        """Share of its time that other processes cost; None where that is not known."""

    @property
    def num_discarded(self) -> int:
        """Interrupted attempts before it."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which passes were measured.

    Args:
        load: before.
        num_passes: passes that count.
        num_interrupted: counted passes that other processes interrupted nevertheless.
        num_discarded: interrupted passes that were decoded again and do not count.
        lost_share: share of the counted passes' time that other processes cost; None where the system does not say.
    """

    load: Load
    num_passes: int
    num_interrupted: int
    num_discarded: int
    lost_share: float | None

    @classmethod
    def of(cls, load: Load, passes: Iterable[CountedPass]) -> Conditions:
        """Conditions of some passes."""
        counted = list(passes)
        known = [(one.lost_share, one.seconds) for one in counted if one.lost_share is not None]
        total = sum(seconds for _, seconds in known)
        lost = sum(share * seconds for share, seconds in known) / total if total else None
        num_interrupted = sum(share > INTERRUPTED_SHARE for share, _ in known)
        return cls(load, len(counted), num_interrupted, sum(one.num_discarded for one in counted), lost)

    @property
    def busy(self) -> str | None:
        """A sentence when what was measured is not the machine's own speed."""
        if self.num_interrupted > _FEW * self.num_passes:
            return (
                f"the machine was busy: {self.num_interrupted} of {self.num_passes} passes lost more than "
                f"{100 * INTERRUPTED_SHARE:.0f} % of their time to other processes or a CPU quota "
                f"({self.load.words} before)"
            )
        if self.load.is_overloaded or (self.lost_share is None and self.load.busy):
            return f"the machine was busy: {self.load.words} before; the measured times may be unreliable"
        return None

    @property
    def discarded(self) -> str | None:
        """A sentence when passes were decoded again."""
        if not self.num_discarded:
            return None
        passes = "1 pass" if self.num_discarded == 1 else f"{self.num_discarded} passes"
        return f"discarded {passes} that other processes interrupted, and decoded again"

    def as_dict(self) -> dict[str, float | int | str | None]:
        """The JSON form, with the load now."""
        return self.load.since() | {
            "busy": self.busy,
            "num_interrupted_passes": self.num_interrupted,
            "num_discarded_passes": self.num_discarded,
            "lost_share": self.lost_share,
        }


def look_at_load() -> Load:
    """The load now."""
    return Load(psutil.getloadavg()[0], num_cores())


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
