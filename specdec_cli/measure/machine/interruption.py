"""How long a pass waited for a processor that other processes had.

Linux says of every thread how long it was ready to run and did not (`/proc/self/task/*/schedstat`). Added up over the
threads, that is the most by which a team that waits for its slowest member can be late: on a quiet machine 0 to 1 % of
a pass, one thread or two, beside one busy process per core from 40 % on. CPU time alone does not tell, for threads that
wait for each other spin. Elsewhere the number of involuntary context switches stands in for it.

A server's threads wait for each other's cores, too, so what other programs cost it is read from the whole machine: the
time of its cores in which they were not idle and none of the measurement's own processes ran.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from time import perf_counter

import psutil

try:
    import resource
except ImportError:  # Windows counts none
    resource = None  # type: ignore[assignment]

INTERRUPTED_SHARE = 0.05
"""A pass that lost more of its time than this was interrupted."""
_THREADS = "/proc/self/task"
_SWITCH_SECONDS = 5e-4  # what an involuntary switch costs at least, measured; quiet passes have up to 90 a second


@dataclass(frozen=True, slots=True)
class Usage:
    """Resource usage of this process up to a moment.

    Args:
        wall_seconds: on the clock.
        cpu_seconds: of all its threads.
        waited_seconds: that its threads were ready to run and did not, added up; None where the system does not say.
        num_switches: involuntary context switches; None where the system does not count them.
    """

    wall_seconds: float
    cpu_seconds: float
    waited_seconds: float | None
    num_switches: int | None

    def lost_share_since(self, before: Usage, is_computing: bool) -> float | None:
        """Share of the time since an earlier moment that other processes cost; None where the system does not say.

        Args:
            before: the earlier moment.
            is_computing: whether some thread of this process should have run all the time: on a CPU, not on a GPU.
        """
        wall = self.wall_seconds - before.wall_seconds
        if self.waited_seconds is not None and before.waited_seconds is not None:
            lost = self.waited_seconds - before.waited_seconds
        elif self.num_switches is not None and before.num_switches is not None:
            lost = (self.num_switches - before.num_switches) * _SWITCH_SECONDS
        else:
            return None
        if is_computing:
            lost = max(lost, wall - (self.cpu_seconds - before.cpu_seconds))
        return max(0.0, min(lost / wall, 1.0)) if wall > 0 else 0.0


@dataclass(frozen=True, slots=True)
class MachineUsage:
    """Processor time of the whole machine up to a moment.

    Args:
        wall_seconds: on the clock.
        idle_seconds: of all its cores, added up.
        own_seconds: that the processes of a measurement used, added up.
        num_cores: of the machine, whether or not this process may use them.
    """

    wall_seconds: float
    idle_seconds: float
    own_seconds: float
    num_cores: int

    def others_share_since(self, before: MachineUsage) -> float:
        """Share of the cores' time since an earlier moment that other programs used."""
        total = (self.wall_seconds - before.wall_seconds) * self.num_cores
        others = total - (self.idle_seconds - before.idle_seconds) - (self.own_seconds - before.own_seconds)
        return max(0.0, min(others / total, 1.0)) if total > 0 else 0.0


def look_at_machine(server_seconds: float) -> MachineUsage:
    """Processor time of the machine until now.

    Args:
        server_seconds: processor time of a server that this process measures, its children included.
    """
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    return MachineUsage(perf_counter(), idle, server_seconds + time.process_time(), psutil.cpu_count() or 1)


def look_at_usage() -> Usage:
    """Resource usage of this process until now."""
    switches = None if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    return Usage(perf_counter(), time.process_time(), _waited_seconds(), switches)


def _waited_seconds() -> float | None:
    """Seconds that the threads waited for a processor, added up; None where the system does not say."""
    try:
        threads = os.listdir(_THREADS)
        return sum(map(_waited_nanoseconds, threads)) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def _waited_nanoseconds(thread: str) -> int:
    try:
        with open(f"{_THREADS}/{thread}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        if not os.path.exists(f"{_THREADS}/{thread}"):
            return 0  # a thread that has ended meanwhile
        raise
