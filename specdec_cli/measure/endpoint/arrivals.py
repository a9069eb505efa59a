"""When requests arrive: a Poisson process of a given rate, the same for the same seed."""

from __future__ import annotations

from itertools import accumulate
from math import inf, isnan
from random import Random

from specdec_cli.errors import UsageError


def parse_rate(rate: float | None) -> float:
    """Read `--request-rate`; without one, requests are there from the beginning.

    Raises:
        UsageError: it is no positive number.
    """
    if rate is None:
        return inf
    if isnan(rate) or rate <= 0:
        raise UsageError(f"`--request-rate {rate:g}` must be above 0", "requests per second, or inf")
    return rate


def arrival_times(num: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start to each of `num` arrivals, in order.

    Args:
        num: how many.
        rate: of arrivals, per second; gaps are exponential with mean 1 / rate. Of `inf` all arrive at once.
        seed: of the gaps.
    """
    if rate == inf:
        return [0.0] * num
    chance = Random(seed)
    return list(accumulate(chance.expovariate(rate) for _ in range(num)))
