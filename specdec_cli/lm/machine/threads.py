"""Threads of forward passes, and of torch's operators between them: as many as there are free cores."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

from specdec_cli.lm.machine.cgroups import cpu_quota

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# transformers' forward of a small model is many short operators. On a busy machine, and a server's own event loop makes
# it one, threads wait for each other in each of them, and it takes longer than on one thread.
SMALL_WEIGHTS_BYTES = 32 * 2**20

_MEMORY = 8  # forwards that a share looks back on
_CALM = 2 * _MEMORY  # forwards without trouble, after which the next one is met with a short rest again
_TOO_LONG = 0.5  # of the time; of two threads one gains by being alone once it waits two thirds
_REST, _LONGEST_REST = 4, 128  # times what was lost: so long a thread is left out, twice as long each time
_STALL_SECONDS = 0.0005  # a wait this long is a thread without a core: systems take one away for milliseconds
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.01, 0.64  # between two looks at who else wants the cores
_RUNNABLE = "/proc/loadavg"  # `1.39 0.91 0.44 2/96 9360`: two of 96 threads run or wait for a core


class RunQueue:
    """How many threads of the whole machine run or wait for a core, as Linux counts them at this moment.

    A look takes some four microseconds: the file stays open.
    """

    def __init__(self, path: str = _RUNNABLE) -> None:
        try:
            self._file: int | None = os.open(path, os.O_RDONLY)
        except OSError:
            self._file = None

    def __call__(self) -> int | None:
        """Threads that run or wait, including this one; None if the system does not say."""
        if self._file is None:
            return None
        try:
            return int(os.pread(self._file, 64, 0).split()[3].split(b"/")[0])
        except (OSError, ValueError, IndexError):
            self._file = None
            return None


class ThreadCount:
    """Number of threads for forwards whose threads meet again and again: all, or fewer while others take their cores.

    A thread that does not run keeps all others waiting, some fifty times in a forward: beside one busy process on two
    cores two threads take several times as long as one. There are therefore no more threads than cores that no other
    process wants. The machine's run queue is read before the first forward, and again when a thread has kept the others
    waiting; while others want cores, it is read again every few hundredths of a second.

    The run queue does not show everything (other systems than Linux, a container's share of the cores, a host that
    takes a virtual core away). So what forwards lose to waiting is watched as well. Where that is more than a thread is
    worth, one is left out for some times as long as was lost, and then tried again. The first time it may have been an
    interruption that is over, so it takes a second one within that time.

    Args:
        clock: seconds.
        num_runnable: threads of the machine that run or wait for a core, this one among them; None where unknown.
        num_cores: of the machine.
    """

    def __init__(
        self,
        clock: Callable[[], float] = perf_counter,
        num_runnable: Callable[[], int | None] | None = None,
        num_cores: int | None = None,
    ) -> None:
        self._clock = clock
        self._num_runnable = RunQueue() if num_runnable is None else num_runnable
        self._num_cores = num_cores or os.cpu_count() or 1
        self._num_wanted_elsewhere: int | None = None
        self._look_at = 0.0
        self._look_seconds = _LOOK_SECONDS
        self._left_out = 0
        self._until = 0.0
        self._suspected_until = 0.0
        self._rest = _REST
        self._seconds = self._waited = 0.0
        self._num_calm = 0

    def size(self, most: int) -> int:
        """Threads of the next forward, of `most` at most."""
        if self._num_wanted_elsewhere is None:
            self._look(1)
        if self._left_out and self._clock() >= self._until:
            self._left_out -= 1
            self._forget()
        return max(min(most, self._num_cores - (self._num_wanted_elsewhere or 0)) - self._left_out, 1)

    def learn(self, size: int, seconds: float, waited: float) -> None:
        """Learn from a forward that has just ended.

        Args:
            size: threads that it had.
            seconds: it took.
            waited: seconds that the longest-waiting thread waited for others.
        """
        self._look_when_due(size)
        if size == 1:
            return
        if waited > max(_STALL_SECONDS, _TOO_LONG * seconds) and self._is_crowded(size):
            self._forget()
            return
        self._seconds += seconds - self._seconds / _MEMORY
        self._waited += waited - self._waited / _MEMORY
        self._num_calm += 1
        if self._waited > max(2 / (size + 1), _TOO_LONG) * self._seconds:
            now, rest = self._clock(), self._rest * self._waited
            if self._rest > _REST or now < self._suspected_until:
                self._left_out += 1
                self._until = now + rest
                self._rest = min(2 * self._rest, _LONGEST_REST)
            else:
                self._suspected_until = now + rest
            self._forget()
        elif self._num_calm >= _CALM:
            self._rest, self._look_seconds = _REST, _LOOK_SECONDS

    def learn_of_interruption(self, size: int, is_interrupted: bool) -> None:
        """Learn from a forward that does not tell how long its threads waited.

        Args:
            size: threads that it had. Those that spin still are taken for others': it costs one look's time alone.
            is_interrupted: whether others took cores away meanwhile.
        """
        self._look_when_due(size)
        if size > 1 and is_interrupted:
            self._is_crowded(1)

    def _is_crowded(self, own: int) -> bool:
        """Whether others are seen to want cores that these threads had; the next time it takes longer to try again."""
        self._look(own)
        if self._num_wanted_elsewhere:
            self._look_seconds = min(2 * self._look_seconds, _LONGEST_LOOK_SECONDS)
        return bool(self._num_wanted_elsewhere)

    def _look_when_due(self, own: int) -> None:
        if self._num_wanted_elsewhere and self._clock() >= self._look_at:
            self._look(own)

    def _look(self, own: int) -> None:
        """Count what others want; the own threads, which have just worked, are runnable too."""
        runnable = self._num_runnable()
        self._num_wanted_elsewhere = 0 if runnable is None else max(runnable - own, 0)
        self._look_at = self._clock() + self._look_seconds

    def _forget(self) -> None:
        self._seconds = self._waited = 0.0
        self._num_calm = 0


THREADS = ThreadCount()  # of all models: it is the process that shares the cores with others
_NUM_SWITCHES = 2  # in one forward: one may be a moment's interruption


def allot_threads() -> int:
    """Give torch no more threads than a container's share of the processors; OMP_NUM_THREADS always wins.

    Returns:
        The number of threads in force.
    """
    quota = None if "OMP_NUM_THREADS" in os.environ else cpu_quota()
    if quota is not None and quota < torch.get_num_threads():
        torch.set_num_threads(max(math.ceil(quota), 1))
    return torch.get_num_threads()


def most_threads(weight_bytes: int) -> int:
    """Threads that transformers' forward of a model with weights of so many bytes has at most."""
    is_small = "OMP_NUM_THREADS" not in os.environ and weight_bytes <= SMALL_WEIGHTS_BYTES
    return 1 if is_small else torch.get_num_threads()


@contextmanager
def free_cores(most: int | None = None) -> Iterator[int]:
    """Run torch's operators on the cores that no other process wants.

    Each operator waits for its slowest thread, and on a busy machine that is one without a core.

    Args:
        most: threads, if fewer than torch's.

    Yields:
        The number of threads.
    """
    before = torch.get_num_threads()
    size = THREADS.size(before if most is None else min(most, before))
    if size != before:
        torch.set_num_threads(size)
    try:
        yield size
    finally:
        if size != before:
            torch.set_num_threads(before)


@contextmanager
def watched_forward(most: int) -> Iterator[None]:
    """Run a forward on up to `most` free cores, and notice when others took some away meanwhile."""
    num_before = _num_switches()
    with free_cores(most) as size:
        yield
    THREADS.learn_of_interruption(size, _num_switches() - num_before >= _NUM_SWITCHES)


@contextmanager
def fixed_threads(number: int) -> Iterator[None]:
    """Run a forward pass on so many threads, whatever other processes run."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _num_switches() -> int:
    """How often a thread of this process had to leave a core to another one."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
