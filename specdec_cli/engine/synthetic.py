"""Synthetic acceptance: how often drafted tokens are to stand, whatever the draft is worth.

Rates are marginal: entry i is the probability that drafted tokens 1…i+1 of a step all stand, as in vLLM's
`rejection_sample_method: synthetic`. A given acceptance length becomes one chance α for every drafted token,
1 + α + … + α^k (Leviathan, Kalman, Matias 2022); vLLM's own length option accepts a nearly fixed number instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec_cli.errors import UsageError
from specdec_cli.tree_shape import TreeShape

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Speculation


def iid_length(alpha: float, k: int) -> float:
    """Tokens per step E = (1 - α^(k+1)) / (1 - α) if every drafted token stood with probability α on its own."""
    return sum(alpha**i for i in range(k + 1))


def solve_alpha(length: float, k: int) -> float:
    """The α at which iid_length is `length`, by bisection; 0 where one token a step is enough."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if iid_length(middle, k) < length else (low, middle)
    return high if length > 1 else 0.0


def synthetic_rates(speculation: Speculation) -> tuple[float, ...] | None:
    """A recipe's marginal rates, one for each position of its chain or depth of its tree; None where it has none."""
    length, k = speculation.synthetic_acceptance_length, speculation.num_speculative_tokens
    if length is None:
        return speculation.synthetic_acceptance_rates
    shape = None if speculation.tree is None else TreeShape.parse(speculation.tree)
    if shape is not None and not shape.is_dynamic:
        k = shape.depth
    alpha = solve_alpha(length, k)
    return tuple(alpha**i for i in range(1, k + 1))


def at_depth(speculation: Speculation, k: int) -> Speculation:
    """The same with another k and, where it is synthetic, the same acceptance of each drafted token.

    A length keeps its α.

    Raises:
        UsageError: a k beyond the given rates, whose acceptance is not known.
    """
    rates, length = speculation.synthetic_acceptance_rates, speculation.synthetic_acceptance_length
    if length is not None:
        length = iid_length(solve_alpha(length, speculation.num_speculative_tokens), k)
    if rates is not None and k > len(rates):
        raise UsageError(
            f"the synthetic acceptance of `{k}` drafted tokens is not known from `{len(rates)}` rates",
            "give a rate for each, or a smaller k",
        )
    rates = None if rates is None else rates[:k]
    changed = {
        "num_speculative_tokens": k,
        "synthetic_acceptance_length": length,
        "synthetic_acceptance_rates": rates,
    }
    return speculation.model_copy(update=changed)


def conditional(rates: Sequence[float]) -> tuple[float, ...]:
    """For each position the chance that it stands when all before it do; 0 after a rate of 0.

    Raises:
        UsageError: rates outside 0 to 1, or one above the one before it.
    """
    befores = (1.0, *rates)[: len(rates)]
    if any(not 0 <= rate <= before for before, rate in zip(befores, rates, strict=True)):
        raise UsageError(
            f"the synthetic acceptance rates are not marginal rates: `{list(rates)}`",
            "give rates from 0 to 1 that do not increase",
        )
    return tuple(rate / before if before > 0 else 0.0 for before, rate in zip(befores, rates, strict=True))
