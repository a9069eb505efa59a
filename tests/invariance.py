"""Whether this machine's kernels are row-invariant, which is tested once in a process: it takes seconds."""

import functools
from typing import Any

import torch


@functools.cache
def known_invariance(dtype: torch.dtype) -> list[Any]:
    """The checks of `row_invariance`."""
    from specdec_cli.lm.invariance import row_invariance

    return row_invariance(dtype)


def holds(dtype: torch.dtype) -> bool:
    """Whether all that are needed hold."""
    return all(check.holds for check in known_invariance(dtype) if check.needed)
