"""A cost profile: medians of the parts of a step, and the rounds they come from.

A prediction is no surer than the medians that it rests on. Rounds are resampled whole, so that what slowed a machine
down for a while slows draft, verification and plain step of the same resample alike.

Letters: R rounds, C context lengths, W columns of `Costs`, S resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from specdec_cli.document import Count
from specdec_cli.measure.stats import NUM_RESAMPLES, FloatArray
from specdec_cli.tree_shape import TreeShape

ENOUGH = 6
"""The true median lies among R values with probability 1 - 2^(1-R): from six on with more than 95 %."""
_EVEN = 0.05  # of the speed of no draft: what a few held-out prompts cannot tell apart
_BLOCK = 1 << 22  # numbers of one block of resamples, so that memory stays small


@dataclass(frozen=True, slots=True)
class ProfileLoad:
    """Load of the machine: runnable processes in the minute before and after, and the number of cores."""

    before: float
    after: float
    num_cores: Annotated[Count, Field(serialization_alias="cores")]


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
        """Number R of rounds."""
        return len(self.target)

    @property
    def flat(self) -> FloatArray:
        """All figures [R, M] of each round in a row, in the order of `Costs.flat`."""
        parts = (self.target, self.draft, self.overhead)
        return np.concatenate([part.reshape(len(self), -1) for part in parts], axis=1)

    def only(self, columns: list[int]) -> Rounds:
        """The rounds of some columns."""
        return Rounds(self.target[..., columns], self.draft[..., columns], self.overhead[:, columns])

    def drawn_medians(self) -> FloatArray:
        """Medians [S, M] of as many rounds as there are, drawn with replacement."""
        flat, generator = self.flat, np.random.default_rng([0, len(self)])
        size = max(1, _BLOCK // flat.size)
        medians = []
        for begin in range(0, NUM_RESAMPLES, size):
            drawn = generator.integers(0, len(self), size=(min(size, NUM_RESAMPLES - begin), len(self)))
            medians.append(np.median(flat[drawn], axis=1))
        return np.concatenate(medians)

    @classmethod
    def joined(cls, several: list[Rounds]) -> Rounds:
        """The rounds of several profiles of the same configurations."""
        names = ("target", "draft", "overhead")
        return cls(*(np.concatenate([getattr(rounds, name) for rounds in several]) for name in names))


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Seconds of the parts of a step, medians.

    Of the W columns of each table the first k_max + 1 are steps that draft chains of 0…k_max tokens, and the others are
    steps with the measured trees.

    Args:
        k_max: largest k.
        context_lengths: [C] tokens before a step, ascending.
        target_seconds: [C, W] a target's forward of one row more than there are drafted tokens, in each sequence.
        draft_seconds: [C, W] a draft's guess; the first column is 0.
        overhead_seconds: [W] the engine's own work in a step.
        batch_size: sequences in each.
        num_repeats: measurements behind each median.
        seconds: what the profile took.
        load: of the machine.
        rounds: what the medians are of; None where it is not known, and then they are taken for sure.
        num_in_turn: rounds that were taken between the passes that the costs predict.
        trees: the measured trees.
    """

    k_max: int
    context_lengths: tuple[int, ...]
    target_seconds: FloatArray
    draft_seconds: FloatArray
    overhead_seconds: FloatArray
    batch_size: int
    num_repeats: int
    seconds: float
    load: ProfileLoad
    rounds: Rounds | None = None
    num_in_turn: int = 0
    trees: tuple[TreeShape, ...] = ()

    @property
    def num_columns(self) -> int:
        """Number W of columns."""
        return self.k_max + 1 + len(self.trees)

    @property
    def warning(self) -> str | None:
        """A sentence where intervals that rest on these costs are narrower than they should be."""
        if self.rounds is not None and len(self.rounds) >= ENOUGH:
            return None
        return (
            f"step costs at batch size {self.batch_size} were measured in {self.num_repeats} rounds, and it takes "
            f"{ENOUGH} to know how certain they are: predicted intervals are too narrow"
        )

    @property
    def flat(self) -> FloatArray:
        """All medians [M] in a row: target, draft, overhead."""
        return np.concatenate([self.target_seconds.ravel(), self.draft_seconds.ravel(), self.overhead_seconds])

    def drawn(self) -> FloatArray:
        """The medians [S, M] of resampled rounds, in the order of `flat`; without rounds always the same."""
        if self.rounds is None:
            return np.broadcast_to(self.flat, (NUM_RESAMPLES, len(self.flat)))
        return self.rounds.drawn_medians()

    def context_shares(self, context: FloatArray) -> FloatArray:
        """How a cost at each context [B] is made of those at the measured lengths: shares [B, C] that add up to 1."""
        corners = np.eye(len(self.context_lengths))
        return np.stack([_between(context, self.context_lengths, corner) for corner in corners], axis=1)

    def target(self, num_rows: int, context: FloatArray | float) -> FloatArray:
        """Seconds of a forward of rows at a context, between the measured lengths by a straight line."""
        return _between(context, self.context_lengths, self.target_seconds[:, num_rows - 1])

    def draft(self, k: int, context: FloatArray | float) -> FloatArray:
        """Seconds of guessing k tokens at a context."""
        return _between(context, self.context_lengths, self.draft_seconds[:, k])

    def plain(self, context: FloatArray | float) -> FloatArray:
        """Seconds t_AR of a step without a draft: one row and the engine's own work."""
        seconds: FloatArray = self.target(1, context) + self.overhead_seconds[0]
        return seconds

    def draft_seconds_per_token(self, context: float) -> float:
        """Seconds of each drafted token: the slope of the guess's cost over 1…k, by least squares through 0."""
        k = np.arange(1, self.k_max + 1)
        seconds = np.array([float(self.draft(int(i), context)) for i in k])
        return float((k * seconds).sum() / (k * k).sum())

    @property
    def middle_context(self) -> int:
        """The measured context in the middle, at which single figures are quoted."""
        return self.context_lengths[len(self.context_lengths) // 2]

    def only(self, trees: Sequence[TreeShape]) -> Costs:
        """The costs of chains and of some of the measured trees."""
        columns = [*range(self.k_max + 1), *(self.k_max + 1 + self.trees.index(tree) for tree in trees)]
        return replace(
            self,
            target_seconds=self.target_seconds[:, columns],
            draft_seconds=self.draft_seconds[:, columns],
            overhead_seconds=self.overhead_seconds[columns],
            rounds=None if self.rounds is None else self.rounds.only(columns),
            trees=tuple(trees),
        )


def _between(context: FloatArray | float, lengths: Sequence[int], seconds: FloatArray) -> FloatArray:
    return np.asarray(np.interp(context, lengths, seconds), dtype=np.float64)


def joined(several: Sequence[Costs]) -> Costs:
    """The medians over all rounds of several profiles, the earliest first, without trees that one of them lacks."""
    trees = [tree for tree in several[0].trees if all(tree in costs.trees for costs in several)]
    several = [costs.only(trees) for costs in several]
    first, last = several[0], several[-1]
    rounds = Rounds.joined([costs.rounds for costs in several if costs.rounds is not None])
    return replace(
        first,
        target_seconds=np.median(rounds.target, axis=0),
        draft_seconds=np.median(rounds.draft, axis=0),
        overhead_seconds=np.median(rounds.overhead, axis=0),
        num_repeats=len(rounds),
        seconds=sum(costs.seconds for costs in several),
        load=replace(first.load, after=last.load.after),
        rounds=rounds,
    )


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
