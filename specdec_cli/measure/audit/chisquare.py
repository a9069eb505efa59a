"""Chi-square of drawn token sequences against their exact enumeration: is the output the target's own distribution?"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

Cell = TypeVar("Cell", bound=Hashable)
# Below about five expected counts a cell's share of the statistic is no longer chi-square; such cells count as one.
SMALLEST_EXPECTATION = 5.0


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A test's outcome: the statistic, its degrees of freedom, and how likely one as large is if all is well."""

    statistic: float
    dof: int
    p_value: float


def enumerate_joint(
    next_token_probs: Callable[[tuple[int, ...]], npt.NDArray[np.floating]], prompt: Sequence[int], length: int
) -> dict[tuple[int, ...], float]:
    """Exact probabilities of the first `length` tokens after a prompt.

    Args:
        next_token_probs: from a context, prompt and output, to the next token's probabilities [V].
        prompt: the tokens before the first.
        length: tokens in a cell.

    Returns:
        Every sequence that can occur, with its probability; they add up to 1.
    """
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in joint.items():
            probs = np.asarray(next_token_probs((*prompt, *tokens)), dtype=np.float64)
            for token in np.flatnonzero(probs).tolist():
                longer[(*tokens, token)] = probability * float(probs[token])
        joint = longer
    return joint


def chi_square(counts: Mapping[Cell, int], probabilities: Mapping[Cell, float]) -> ChiSquare:
    """Pearson's test of counts against probabilities; cells with a small expectation are pooled.

    A count in a cell that cannot occur makes the statistic infinite and the p-value 0.
    """
    num_draws = sum(counts.values())
    if any(count and not probabilities.get(cell, 0.0) for cell, count in counts.items()):
        return ChiSquare(math.inf, max(len(probabilities) - 1, 1), 0.0)
    cells = sorted(
        ((probability * num_draws, counts.get(cell, 0)) for cell, probability in probabilities.items()),
        key=lambda pair: pair[0],
    )
    expected, observed = _pool(cells)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    dof = len(expected) - 1
    return ChiSquare(statistic, dof, tail_probability(statistic, dof))


def _pool(cells: Sequence[tuple[float, int]]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Expectations and counts of cells, given in ascending order, the small ones added up until large enough."""
    expected: list[float] = [0.0]
    observed: list[float] = [0.0]
    for expectation, count in cells:
        if expectation >= SMALLEST_EXPECTATION and (expected[0] >= SMALLEST_EXPECTATION or expected[0] == 0.0):
            expected.append(expectation)
            observed.append(count)
        else:
            expected[0] += expectation
            observed[0] += count
    first = 0 if expected[0] else 1
    return np.array(expected[first:]), np.array(observed[first:])


def tail_probability(statistic: float, dof: int) -> float:
    """P(X >= statistic) for a chi-square variable X; 1 without degrees of freedom."""
    if dof < 1:
        return 1.0
    half = torch.tensor([dof / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def detectable_shift(num_draws: int, dof: int, false_alarm: float = 1e-6) -> float:
    """Smallest total-variation shift, even over the cells, that so many draws find with 99 % power.

    A shift d adds num_draws (2 d)^2 to the mean of the statistic; its spread is taken as normal.
    """
    critical = _solve(lambda statistic: false_alarm - tail_probability(statistic, dof), 100.0 * (dof + 100))
    quantile_of_power = 2.3263
    noncentrality = _solve(
        lambda extra: dof + extra - quantile_of_power * math.sqrt(2 * (dof + 2 * extra)) - critical, 100.0 * critical
    )
    return min(1.0, math.sqrt(noncentrality / num_draws) / 2)


def _solve(rising: Callable[[float], float], high: float) -> float:
    """The zero of a rising function in [0, high], by bisection."""
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) >= 0 else (middle, high)
    return high
