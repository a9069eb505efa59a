"""Step costs measured between the passes that they predict, so that both cover the same minutes.

A shared machine changes its pace while it measures: a profile taken beforehand was off by up to a half where profiles
taken in turn were off by a tenth. So the profile taken beforehand chooses what is measured, and rounds that stand
between the turns of the passes make the prediction that is set beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from specdec_cli.measure.predict.cost import ENOUGH, Costs, joined
from specdec_cli.measure.predict.predict import Prediction
from specdec_cli.measure.stats import FloatArray

_MOST_SLOTS = 12  # of a run, each a round or more
_SLOTS_PER_OVERHEAD = 3  # the engine's own work is a few per cent of a step: fewer samples do

Measure = Callable[[str, int, int, FloatArray | None], Costs]
"""Profile at a place that has a name: number of the first round, rounds, and the engine's own work if it is known."""


@dataclass(slots=True)
class InTurn:
    """The profiles between a sweep's passes.

    Args:
        measure: takes a profile.
        predict: predicts speed-ups from step costs.
        profiles: taken so far.
    """

    measure: Measure
    predict: Callable[[Costs], Prediction]
    profiles: list[Costs] = field(default_factory=list)

    @property
    def num_rounds(self) -> int:
        """Rounds taken so far."""
        return sum(profile.num_repeats for profile in self.profiles)

    def before(self, turn: int, num_turns: int) -> None:
        """Profile before a turn (every arm's pass over one group), if it is one of the evenly spread places."""
        stride = math.ceil(num_turns / _MOST_SLOTS)
        if turn % stride == 0:
            num_slots = math.ceil(num_turns / stride) + 1
            self._take(f"before turn {turn}", math.ceil(ENOUGH / num_slots))

    def after(self) -> None:
        """Profile after the last turn, and make up for turns that were not needed."""
        self._take("after the last turn", max(1, ENOUGH - self.num_rounds))

    def costs(self, beforehand: Costs) -> Costs:
        """Costs measured between the passes, or from the profile taken beforehand if there are too few."""
        if not self.profiles:
            return beforehand
        is_enough = self.num_rounds >= ENOUGH
        costs = joined(self.profiles if is_enough else [beforehand, *self.profiles])
        return replace(costs, num_in_turn=self.num_rounds)

    def _take(self, name: str, num_rounds: int) -> None:
        is_due = len(self.profiles) % _SLOTS_PER_OVERHEAD == 0
        known = None if is_due else self.profiles[-1].overhead_seconds
        self.profiles.append(self.measure(name, self.num_rounds, num_rounds, known))
