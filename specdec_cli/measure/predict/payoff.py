"""Whether a draft pays, from its acceptance by depth and the costs of steps: its speed-up at its best k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec_cli.measure.predict.cost import Costs

_EVEN = 0.05  # of the speed of no draft: what a few held-out prompts cannot tell apart


@dataclass(frozen=True, slots=True)
class Payoff:
    """A draft at the k that is predicted to be fastest.

    Args:
        k: tokens drafted in a step.
        tokens_per_step: that a step gives, the target's own one included.
        plain_steps: what a step costs, in steps without a draft.
    """

    k: int
    tokens_per_step: float
    plain_steps: float

    @classmethod
    def of(cls, costs: Costs, acceptance_by_depth: Sequence[float]) -> Payoff:
        """The best k up to the depth whose acceptance is known.

        Args:
            costs: of the pair, up to that k.
            acceptance_by_depth: shares of the steps that accepted the token at a depth and all before it.
        """
        context, lengths = costs.middle_context, 1 + np.cumsum(acceptance_by_depth)
        plain = float(costs.plain(context))
        made = []
        for k, length in enumerate(lengths, 1):
            seconds = costs.target(k + 1, context) + costs.draft(k, context) + costs.overhead_seconds[k]
            made.append(cls(k, float(length), float(seconds) / plain))
        return max(made, key=lambda payoff: payoff.speedup)

    @property
    def speedup(self) -> float:
        """Speed-up of decoding over no draft."""
        return self.tokens_per_step / self.plain_steps

    def words(self) -> str:
        """The verdict on the draft in a sentence."""
        figures = (
            f"at its best k = {self.k} a step gives {self.tokens_per_step:.2f} tokens and costs "
            f"{self.plain_steps:.2f} plain steps, so decoding should be {self.speedup:.2f} times as fast as without it"
        )
        if self.speedup > 1 + _EVEN:
            return f"the draft pays: {figures}"
        if self.speedup > 1 - _EVEN:
            return f"the draft breaks about even: {figures}; it needs more steps or more data to pay"
        return f"the draft does not pay yet: {figures}; {self.plain_steps:.2f} tokens a step would break even"
