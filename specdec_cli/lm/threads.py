"""How many threads torch uses on a CPU."""

from __future__ import annotations

import os

import torch

# A second thread halves the time of the built-in target's forward on a quiet machine (benchmarks/results/threads.json).
# On a busy one, and a server's own event loop makes it one, threads wait for each other at every product, and a small
# model's forward takes longer than on one: it has the cores only for who asks for them.
SMALL_WEIGHTS_BYTES = 32 * 2**20


def choose_threads(weight_bytes: int) -> int:
    """Set torch to one thread for a small target and leave its own choice otherwise; OMP_NUM_THREADS always wins.

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
