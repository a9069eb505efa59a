"""The probability that drafted tokens are accepted, learned from earlier ones."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from specdec_cli.engine.depth import tuning

_LARGE = 1e12  # weights are scaled down beyond, long before a float overflows


class Survival:
    """P(at least j drafted tokens are accepted), from counts that fade; a prior stands in for what was not seen.

    Instead of old counts that shrink with every step, new ones grow: a step then touches only what it tells of.

    Args:
        prior: of all requests of the drafter; None for that one itself.
        expected: P(token j, given those before it) as long as nothing was seen.
    """

    def __init__(self, prior: Survival | None = None, expected: float = tuning.UNSEEN_ACCEPTANCE) -> None:
        self._prior = prior
        self._expected = expected
        self._growth = 1 / (1 - 1 / (tuning.POOL_MEMORY_STEPS if prior is None else tuning.REQUEST_MEMORY_STEPS))
        self._weight = 1.0  # what the newest step counts for
        self._refused: list[float] = []  # steps by how many tokens were accepted before one was refused
        self._whole: list[float] = []  # and by how many were asked for where all were accepted
        self._found: list[float] = []
        self._num_steps = 0
        self._curve: list[float] = []
        self._curve_of = (0, 0, 0)

    def curve(self, k: int) -> list[float]:
        """s(1) … s(k)."""
        known = (k, self._num_steps, self._prior._num_steps if self._prior else 0)
        if known != self._curve_of:
            self._curve_of = known
            self._curve = list(accumulate(self._conditionals(k)[:k], mul))
        return self._curve

    def add(self, num_asked: int, num_accepted: int, num_steps: int = 1) -> None:
        """Steps that asked for tokens; one that the drafter did not give is one that was not accepted."""
        self._num_steps += num_steps
        self._weight *= self._growth**num_steps
        if self._weight > _LARGE:
            self._refused = [weight / self._weight for weight in self._refused]
            self._whole = [weight / self._weight for weight in self._whole]
            self._weight = 1.0
        missing = [0.0] * (num_asked + 1 - len(self._whole))
        self._refused += missing
        self._whole += missing
        (self._refused if num_accepted < num_asked else self._whole)[num_accepted] += num_steps * self._weight
        self._found = []

    def _conditionals(self, k: int) -> list[float]:
        """P(token j is accepted, given that those before it are), j = 1 … k or more."""
        if self._prior is None and len(self._found) >= k:
            return self._found
        prior = None if self._prior is None else self._prior._conditionals(k)
        ended = [refused + whole for refused, whole in zip(self._refused, self._whole, strict=True)]
        went_on = list(accumulate(reversed(ended)))[::-1]
        went_on += [0.0] * (k + 1 - len(went_on))
        found, before, prior_weight = [], self._expected, tuning.PRIOR_STEPS * self._weight
        for j in range(k):
            accepted = went_on[j + 1]
            tried = accepted + (self._refused[j] if j < len(self._refused) else 0.0)
            # What was rarely reached in a drafter's steps is taken to be like the position before it.
            expected = before if prior is None else prior[j]
            before = (accepted + prior_weight * expected) / (tried + prior_weight)
            found.append(before)
        self._found = found
        return found
