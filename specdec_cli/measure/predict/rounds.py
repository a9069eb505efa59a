"""The rounds of a cost profile: each configuration's seconds, round by round, and medians of resampled rounds.

A prediction is no surer than the medians that it rests on. Rounds are drawn whole, so that what slowed a machine down
for a while slows draft, verification and plain step of the same draw alike.

Letters: R rounds, C context lengths, W columns of `Costs`, S resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdec_cli.measure.stats import FloatArray

ENOUGH = 6
"""The true median lies among R values with probability 1 - 2^(1-R): from six on with more than 95 %."""
_BLOCK = 1 << 22  # numbers of one block of resamples, so that memory stays small


@dataclass(frozen=True, slots=True, eq=False)
class Rounds:
    """Seconds of every round.

    Args:
        target: [R, C, W] the target's forwards.
        draft: [R, C, W] the draft's guesses.
        overhead: [R, W] the engine's own work as it was last measured; that is not done in every round.
    """

    target: FloatArray
    draft: FloatArray
    overhead: FloatArray

    def __len__(self) -> int:
        """R."""
        return len(self.target)

    @property
    def flat(self) -> FloatArray:
        """All figures [R, M] of each round in a row, in the order of `Costs.flat`."""
        parts = (self.target, self.draft, self.overhead)
        return np.concatenate([part.reshape(len(self), -1) for part in parts], axis=1)

    def only(self, columns: list[int]) -> Rounds:
        """The rounds of some columns."""
        return Rounds(self.target[..., columns], self.draft[..., columns], self.overhead[:, columns])

    def drawn_medians(self, num_resamples: int, seed: int = 0) -> FloatArray:
        """Medians [S, M] of as many rounds as there are, drawn with replacement."""
        flat, generator = self.flat, np.random.default_rng([seed, len(self)])
        size = max(1, _BLOCK // flat.size)
        found = []
        for begin in range(0, num_resamples, size):
            drawn = generator.integers(0, len(self), size=(min(size, num_resamples - begin), len(self)))
            found.append(np.median(flat[drawn], axis=1))
        return np.concatenate(found)

    @classmethod
    def joined(cls, several: list[Rounds]) -> Rounds:
        """The rounds of several profiles of the same configurations."""
        names = ("target", "draft", "overhead")
        return cls(*(np.concatenate([getattr(one, name) for one in several]) for name in names))
