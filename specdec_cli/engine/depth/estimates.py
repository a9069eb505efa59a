"""The moving averages of the adaptive depth: acceptance by position, and a step's seconds by number of rows and k."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul
from statistics import fmean
from typing import NamedTuple

from specdec_cli.engine.depth.depth import DecodingRow

ACCEPTANCE_MEMORY_STEPS = 128
"""Steps that the acceptance of a drafter looks back on."""
UNSEEN_ACCEPTANCE, PRIOR_TOKENS = 0.5, 3.0
"""Acceptance of a first token as long as none was seen, and its weight in tokens. A later position expects that of the
one before it."""
COST_MEMORY_STEPS, OLD_MEMORY_STEPS, OLD_STEPS = 256, 8, 32
"""Steps that a cost looks back on; and one whose last measurement is more than so many steps ago."""
PACE_MEMORY_STEPS, PACE_KNOWN_STEPS = 8, 16
"""Steps that the machine's pace looks back on, and measurements of a cost that make it a full witness of the pace."""
INTERRUPTED_FACTOR = 1.5
"""A step that takes longer, in expected steps, was interrupted: it counts for only so many."""
TRUSTED_STEPS = 2
"""Measurements that make a cost known; the shorter of the first two counts, as one may be interrupted."""
SURE_STEPS, DOUBTED_DEPTH = 12, 2
"""Measurements after which a cost counts as it is, for beside a load a few tell little; and drafted tokens up to which
the drafts' share of a step says what is expected instead, for its parts are delayed alike."""
DRAFT_SHARE_MOST = 0.9
"""Largest share of a step that counts as its drafts', however the clocks were read: seconds stay finite."""
SLOPE_DOUBT_TOKENS, CONTEXT_FACTOR = 4096.0, 4
"""What contexts cost is half believed once squares of what they differ by sum up to the square of so many tokens; and
shorter ones make a step so many times faster at most."""
EXACT_ROWS, ALIKE_ROWS_FACTOR = 8, 2
"""Numbers of rows up to the first have costs of their own; larger ones share those of three leading binary digits. Of
up to the second times as many rows, or as few, costs are borrowed."""
DEEPER_FACTOR = 2
"""Costs are extrapolated to so many times the deepest k that was measured."""


class Acceptance:
    """Probability that drafted tokens are accepted, by position: counts that fade with every step."""

    def __init__(self) -> None:
        self._tried: list[float] = []
        self._accepted: list[float] = []

    def add(self, outcomes: Iterable[tuple[int, int]]) -> None:
        """Learn from a step: of each row the tokens asked for and accepted; what was not drafted was not accepted."""
        tried, accepted = self._tried, self._accepted
        reached = 0
        for asked, num in outcomes:
            tokens = min(num + 1, asked)
            if tokens > len(tried):
                missing = [0.0] * (tokens - len(tried))
                tried += missing
                accepted += missing
            reached = max(reached, tokens)
            for position in range(tokens):
                tried[position] += 1
                accepted[position] += position < num
        fade = 1 - 1 / ACCEPTANCE_MEMORY_STEPS
        for position in range(reached):
            tried[position] *= fade
            accepted[position] *= fade

    def survival(self, k: int, unseen: float = UNSEEN_ACCEPTANCE) -> list[float]:
        """P(at least j tokens are accepted) for j = 1 … k."""
        conditional, rates = unseen, []
        for position in range(k):
            if position < len(self._tried):
                accepted, tried = self._accepted[position], self._tried[position]
                conditional = (accepted + PRIOR_TOKENS * conditional) / (tried + PRIOR_TOKENS)
            rates.append(conditional)
        return list(accumulate(rates, mul))


class Company(NamedTuple):
    """Number of rows and the drafters that may draft for them: beside k, a step's costs depend on these."""

    num_rows: int
    drafters: frozenset[str]

    @classmethod
    def of(cls, rows: Sequence[DecodingRow]) -> Company:
        """The company of these rows."""
        grain = max(len(rows).bit_length() - EXACT_ROWS.bit_length() + 1, 0)
        return cls(len(rows) >> grain << grain, frozenset([row.drafter for row in rows if row.most]))

    def distance(self, other: Company) -> float:
        """How many times as many rows another company has, or as few; infinite where other drafters draft."""
        if self.drafters != other.drafters:
            return float("inf")
        return max(self.num_rows, other.num_rows) / min(self.num_rows, other.num_rows)


@dataclass(slots=True)
class StepCost:
    """A fading mean of a step's seconds at the usual pace.

    Attributes:
        seconds: the mean.
        draft_share: part of it that the drafts take.
        num: measurements.
        last: number of the step measured last.
        context: tokens of all rows' contexts, their mean.
        clocked: the mean of seconds at whatever pace there was.
    """

    seconds: float = 0.0
    draft_share: float = 0.0
    num: int = 0
    last: int = 0
    context: float = 0.0
    clocked: float = 0.0

    def at(self, context: int, slope: float) -> float:
        """Seconds where the contexts have so many tokens, each of which costs `slope` seconds."""
        return max(self.seconds + slope * (context - self.context), self.seconds / CONTEXT_FACTOR)

    def add(self, seconds: float, clocked: float, draft_share: float, context: int, now: int) -> None:
        """Measure step number `now`."""
        weight = 1 / min(self.num + 1, COST_MEMORY_STEPS)
        if self.num >= TRUSTED_STEPS:
            self.seconds += weight * (seconds - self.seconds)
        else:
            self.seconds = min(seconds, self.seconds) if self.num else seconds
        self.draft_share += weight * (min(draft_share, DRAFT_SHARE_MOST) - self.draft_share)
        self.context += weight * (context - self.context)
        self.clocked += weight * (clocked - self.clocked)
        self.num, self.last = self.num + 1, now


class ContextSlopes:
    """Seconds that a token of the contexts adds to a step: more with a draft, and more with each drafted token.

    A target reads its keys and values once in a step. A draft reads its own once for each token, or once for all, and
    some kernels read the target's once for each row to verify. So where contexts are long, a draft that pays elsewhere
    may cost more than it gives. The three slopes are least squares, updated with each step.
    """

    def __init__(self) -> None:
        self._slopes = [0.0, 0.0, 0.0]
        self._doubt = [[float(i == j) / SLOPE_DOUBT_TOKENS**2 for j in range(3)] for i in range(3)]

    def of(self, k: int) -> float:
        """The slope of steps with k drafted tokens; never below that of steps without."""
        plain, drafting, token = self._slopes
        return max(plain + (drafting + k * token if k else 0.0), plain, 0.0)

    def add(self, k: int, longer: float, slower: float) -> float:
        """Learn from a step with a longer context than others with the same k, by so many tokens and seconds.

        Returns:
            How well the slopes were known there before: 1 where the length hardly differs, near 0 far from all others.
        """
        row = (longer, longer if k else 0.0, longer * k)
        gains = [sum(map(mul, row, doubts)) for doubts in self._doubt]
        certainty: float = 1 / (1 + sum(map(mul, row, gains)))
        surprise = certainty * (slower - sum(map(mul, row, self._slopes)))
        self._slopes = [slope + gain * surprise for slope, gain in zip(self._slopes, gains, strict=True)]
        self._doubt = [
            [doubt - certainty * gain * other for doubt, other in zip(doubts, gains, strict=True)]
            for doubts, gain in zip(self._doubt, gains, strict=True)
        ]
        return certainty


@dataclass(slots=True)
class StepCosts:
    """A step's seconds by company and k; those of k = 0 do not depend on the drafters.

    A shared machine is faster at one time than at another. Its pace is kept apart from the costs: else a k that was
    measured in a good moment would seem the better one.
    """

    pace: float = 1.0
    _slopes: ContextSlopes = field(default_factory=ContextSlopes)
    _costs: dict[Company, dict[int, StepCost]] = field(default_factory=dict)

    def of(self, company: Company) -> dict[int, StepCost]:
        """Measurements of a company, by k."""
        return self._costs.get(_plain(company), {}) | self._costs.get(company, {})

    def add(self, company: Company, k: int, seconds: float, draft_share: float, context: int, now: int) -> None:
        """Measure step number `now`; if its cost is known, it tells the pace as well."""
        cost = self._costs.setdefault(company if k else _plain(company), {}).setdefault(k, StepCost())
        usual = seconds / self.pace
        if now - cost.last > OLD_STEPS:
            cost.num = min(cost.num, OLD_MEMORY_STEPS)
        if cost.num >= TRUSTED_STEPS:
            # By the clock: a pace that is followed would hide what longer contexts take.
            longer, expected = context - cost.context, cost.at(context, self._slopes.of(k))
            most = INTERRUPTED_FACTOR * cost.clocked * expected / cost.seconds
            certainty = self._slopes.add(k, longer, min(seconds, most) - cost.clocked)
            surprise = min(max(usual / expected, 1 / INTERRUPTED_FACTOR), INTERRUPTED_FACTOR)
            self.pace *= surprise ** (certainty * min(cost.num / PACE_KNOWN_STEPS, 1) / PACE_MEMORY_STEPS)
            usual = min(usual, INTERRUPTED_FACTOR * expected)
        cost.add(usual, seconds, draft_share, context, now)

    def known(self, company: Company, context: int) -> dict[int, tuple[float, float]]:
        """Seconds at the usual pace and draft share by k; a company of about as many rows lends what is missing."""
        own = self._trusted(self.of(company), context)
        if 0 in own and len(own) > 1:
            return own
        lender = min((other for other in self._costs if other != company), key=company.distance, default=company)
        if company.distance(lender) > ALIKE_ROWS_FACTOR:
            return own
        lent = self._trusted(self.of(lender), context)
        both = own.keys() & lent.keys()
        scale = fmean(own[k][0] / lent[k][0] for k in both) if both else 1.0
        return {k: (seconds * scale, share) for k, (seconds, share) in lent.items()} | own

    def seconds(self, company: Company, most: int, context: int) -> list[float]:
        """Seconds now, by k = 0 … `most` or the deepest k in reach; none before a plain step was measured.

        No step is taken to last longer than one that drafts more, as interruptions only make steps longer. Nor is one
        with drafts shorter than a plain step and the drafts' share beside it.
        """
        known = self.known(company, context)
        if 0 not in known:
            return []
        line = sorted((k, seconds) for k, (seconds, _) in known.items())
        seconds = [line[0][1]]
        for (low, first), (high, last) in pairwise(line):
            seconds += [first + (last - first) * (k - low) / (high - low) for k in range(low + 1, high + 1)]
        # Beyond k = 1 tokens are hoped to be free: a line through a plain step would have each pay for the first one.
        deepest = len(seconds) - 1
        slope = max(seconds[-1] - seconds[-2], 0.0) if deepest > 1 else 0.0
        seconds += [seconds[-1] + slope * more for more in range(1, (DEEPER_FACTOR - 1) * deepest + 1)]
        least = list(accumulate(reversed(seconds[: most + 1]), min))[::-1]
        shares = [known[k][1] if k in known else 0.0 for k in range(len(least))]
        bound = (max(own, least[0] / (1 - share)) for own, share in zip(least, shares, strict=True))
        return [self.pace * own for own in accumulate(bound, max)]

    def _trusted(self, costs: dict[int, StepCost], context: int) -> dict[int, tuple[float, float]]:
        """Seconds and draft share of the costs that are known; one of few measurements is mixed with what is expected.

        Up to DOUBTED_DEPTH tokens that is a plain step beside the drafts' share, and beyond them a line through the
        costs of fewer tokens.
        """
        known: dict[int, tuple[float, float]] = {}
        for k, cost in sorted(costs.items()):
            if cost.num < TRUSTED_STEPS:
                continue
            slope = self._slopes.of(k)
            seconds, share = cost.at(context, slope), cost.draft_share
            if 0 in known and share:
                # The share was measured beside other contexts than these.
                drafting = costs[0].at(round(cost.context), self._slopes.of(0)) / (1 - share)
                longer = slope * (context - cost.context)
                share = min(max(1 - known[0][0] / max(drafting + longer, known[0][0]), 0.0), DRAFT_SHARE_MOST)
            if 0 in known:
                expected = known[0][0] / (1 - share) if share else seconds
                if k > DOUBTED_DEPTH and len(known) > 2:
                    *_, (low, (least, _)), (high, (most, _)) = known.items()
                    expected = most + max(most - least, 0.0) / (high - low) * (k - high)
                expected = min(expected, seconds)
                seconds = expected + min(cost.num / SURE_STEPS, 1.0) * (seconds - expected)
            known[k] = seconds, share
        return known


def _plain(company: Company) -> Company:
    return Company(company.num_rows, frozenset())
