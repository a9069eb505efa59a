"""How busy the machine is, and was while passes were measured; for a measurement's document."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import psutil

from specdec_cli.document import Count, Result, Seconds, Share
from specdec_cli.measure.machine.interruption import INTERRUPTED_SHARE
from specdec_cli.quantities import counted

if TYPE_CHECKING:
    from specdec_cli.measure.bench.passes import Pass
    from specdec_cli.measure.predict.engine_costs import PassTotals

CountedPass: TypeAlias = "Pass | PassTotals"
"""A pass whose time counts, of our own engine or of another one."""
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
        return f"load {self.average:.1f} on {counted(self.num_cores, 'core')}"

    def since(self) -> LoadResult:
        """The load at this moment and now."""
        return LoadResult(load_before=self.average, load_after=_average(), num_cores=self.num_cores, busy=self.busy)


class LoadResult(Result):
    """Load of the machine before and after."""

    load_before: Seconds
    load_after: Seconds
    num_cores: Count
    busy: str | None


class Conditions(LoadResult):
    """Load of the machine, and passes that other processes interrupted.

    `busy` is a sentence when the measured times are not the machine's own speed. Interrupted passes count all the same,
    discarded ones were decoded again. `lost_share` is the share of the counted passes' time that other processes cost;
    null where the system does not say.
    """

    num_interrupted_passes: Count
    num_discarded_passes: Count
    lost_share: Share | None

    @classmethod
    def of_passes(cls, load: Load, passes: Iterable[CountedPass]) -> Conditions:
        """Conditions of some passes, with the load before them."""
        counted = list(passes)
        known = [(each.lost_share, each.seconds) for each in counted if each.lost_share is not None]
        total = sum(seconds for _, seconds in known)
        lost_share = sum(share * seconds for share, seconds in known) / total if total else None
        num_interrupted = sum(share > INTERRUPTED_SHARE for share, _ in known)
        busy = None
        if num_interrupted > _FEW * len(counted):
            busy = (
                f"the machine was busy: {num_interrupted} of {len(counted)} passes lost more than "
                f"{100 * INTERRUPTED_SHARE:.0f} % of their time to other processes or a CPU quota ({load.words} before)"
            )
        elif load.is_overloaded or (lost_share is None and load.busy):
            busy = f"the machine was busy: {load.words} before; the measured times may be unreliable"
        return cls(
            load_before=load.average,
            load_after=_average(),
            num_cores=load.num_cores,
            busy=busy,
            num_interrupted_passes=num_interrupted,
            num_discarded_passes=sum(each.num_discarded for each in counted),
            lost_share=lost_share,
        )

    @property
    def discarded(self) -> str | None:
        """A sentence when passes were decoded again."""
        if not self.num_discarded_passes:
            return None
        passes = "1 pass" if self.num_discarded_passes == 1 else f"{self.num_discarded_passes} passes"
        return f"discarded {passes} that other processes interrupted, and decoded again"


def look_at_load() -> Load:
    """The load now."""
    return Load(_average(), num_cores())


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _average() -> float:
    return psutil.getloadavg()[0]
