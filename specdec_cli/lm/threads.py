"""How many threads a CPU's forwards run on."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter

import torch

# transformers' forward of a small model is many short operators. On a busy machine, and a server's own event loop makes
# it one, threads wait for each other in each of them, and it takes longer than on one thread.
SMALL_WEIGHTS_BYTES = 32 * 2**20

_MEMORY = 8  # forwards that a share looks back on
_CALM = 2 * _MEMORY  # forwards without trouble, after which the next one is met with a short rest again
_TOO_LONG = 0.5  # of the time; of two threads one gains by being alone once it waits two thirds
_REST, _LONGEST_REST = 4, 128  # times what was lost: so long a thread is left out, twice as long each time


def choose_threads(weight_bytes: int) -> int:
    """Set torch to one thread for a small target that transformers computes; OMP_NUM_THREADS always wins.

    Args:
        weight_bytes: of the target.

    Returns:
        The number of threads in force.
    """
    if "OMP_NUM_THREADS" not in os.environ and weight_bytes <= SMALL_WEIGHTS_BYTES:
        torch.set_num_threads(1)
    return torch.get_num_threads()


def adopt_threads() -> int:
    """Give the thread that calls this the process's number of threads; torch does so only once it is asked.

    Returns:
        The number of threads in force.
    """
    return torch.get_num_threads()


class Crew:
    """The threads of forwards whose threads meet again and again: all, or fewer while others take their cores.

    A thread that does not run keeps all others waiting, some fifty times in a forward: beside one busy process on two
    cores two threads take several times as long as one. So what forwards lose to waiting is watched. Where that is more
    than a thread is worth, one is left out for some times as long as was lost, and then tried again. The first time it
    may have been an interruption that is over, so it takes a second one within that time.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._left_out = 0
        self._until = 0.0
        self._suspected_until = 0.0
        self._rest = _REST
        self._seconds = self._waited = 0.0
        self._num_calm = 0

    def size(self, most: int) -> int:
        """Threads of the next forward, of `most` at most."""
        if self._left_out and self._clock() >= self._until:
            self._left_out -= 1
            self._forget()
        return max(most - self._left_out, 1)

    def learn(self, size: int, seconds: float, waited: float) -> None:
        """Learn from a forward.

        Args:
            size: threads that it had.
            seconds: it took.
            waited: seconds that one of them waited for others, the one that waited most.
        """
        if size == 1:
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
            self._rest = _REST

    def _forget(self) -> None:
        self._seconds = self._waited = 0.0
        self._num_calm = 0
