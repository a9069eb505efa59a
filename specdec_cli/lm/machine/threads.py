"""How many threads a CPU's forwards, and torch's operators between them, run on."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specdec_cli.lm.machine.cgroups import cpu_quota
from specdec_cli.lm.machine.crew import Crew

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# transformers' forward of a small model is many short operators. On a busy machine, and a server's own event loop makes
# it one, threads wait for each other in each of them, and it takes longer than on one thread.
SMALL_WEIGHTS_BYTES = 32 * 2**20

CREW = Crew()  # of all models: it is the process that shares the cores with others
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
    size = CREW.size(before if most is None else min(most, before))
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
    CREW.learn_of_interruption(size, _num_switches() - num_before >= _NUM_SWITCHES)


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
