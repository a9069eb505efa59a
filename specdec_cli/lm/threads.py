"""How many threads torch uses on a CPU."""

from __future__ import annotations

import os

import torch

# Measured on the built-in pair (benchmarks/results/threads.json): a model whose weights fit the cache is bound by
# dispatch, not bytes. On a quiet machine a second thread gains the target 7 % at most and the draft 13 %; on a busy
# one it costs a scheduler quantum per product.
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
