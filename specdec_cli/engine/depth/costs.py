"""The costs of steps by the engine's own clocks: by rows, by how many of them draft, and by drafted tokens.

It is drafted tokens that cost, not k: where a drafter finds nothing (n-grams), its search is all that is paid for.
Costs need not be convex in them, so every number has a measurement of its own, but they do not fall, which tells apart
what noise makes look better; what was not measured yet is borrowed from another batch size, in proportion, or read off
a line between neighbours. A shared machine is faster at one time than at another; that is separated from
what a number costs (`Costs.pace`), or one that was last measured in a good moment would seem the better one.
So is what the rows' contexts add, whose keys and values every step reads (`Slope`): as they grow, a plain step may take
twice as long, and what was measured before would be compared with what is measured then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from operator import mul, sub
from statistics import fmean

from specdec_cli.engine.depth import tuning
from specdec_cli.engine.depth.depth import DecodingRow

_PLAIN = -1e-6  # where a plain step stands among drafted tokens: below one whose drafters looked and found nothing


Sample = tuple[float, float, float]
"""Of a step, tokens drafted over the rows that may draft, seconds, tokens of all rows' contexts."""


@dataclass(slots=True)
class Cost:
    """A fading mean of seconds at the usual pace; what interrupts the machine now and then moves it little.

    Attributes:
        seconds: the mean.
        num: measurements.
        drafted: tokens of a row that may draft, the mean of all measurements.
        context: tokens of all rows' contexts, their mean.
        clocked: the mean of seconds at whatever pace there was.
        seen: the number of the last step measured.
    """

    seconds: float = 0.0
    num: int = 0
    drafted: float = 0.0
    context: float = 0.0
    clocked: float = 0.0
    seen: int = 0
    _first: list[float] = field(default_factory=list)

    @property
    def is_trusted(self) -> bool:
        """Whether it was measured often enough."""
        return self.num >= tuning.TRUSTED_MEASUREMENTS

    def at(self, context: float, slope: float) -> float:
        """Seconds where the contexts have so many tokens, each of which costs `slope` seconds."""
        return max(self.seconds + slope * (context - self.context), self.seconds / tuning.CONTEXT_SPEED_UP_MOST)

    def add(self, seconds: float, drafted: float, context: float, clocked: float) -> None:
        """One more measurement."""
        self.num += 1
        self.drafted += (drafted - self.drafted) / min(self.num, tuning.COST_MEMORY_STEPS)
        self.context += (context - self.context) / min(self.num, tuning.COST_MEMORY_STEPS)
        self.clocked += (clocked - self.clocked) / min(self.num, tuning.COST_MEMORY_STEPS)
        if self.num <= 3:  # the middle one; of two the smaller
            self._first.append(seconds)
            self.seconds = sorted(self._first)[self.num // 3]
        else:
            seconds = min(seconds, tuning.INTERRUPTED_FACTOR * self.seconds)
            self.seconds += (seconds - self.seconds) / min(self.num, tuning.COST_MEMORY_STEPS)


@dataclass(slots=True)
class Slope:
    """Seconds that a token of the contexts adds to a step, whose keys and values are read; 0 until it is seen."""

    _covariance: float = 0.0  # of seconds and contexts' tokens within each kind of step, a sum over all
    _variance: float = 0.0  # of contexts' tokens

    @property
    def seconds(self) -> float:
        """For one token."""
        return max(self._covariance, 0.0) / (self._variance + tuning.SLOPE_DOUBT_TOKENS**2)

    def add(self, cost: Cost, clocked: float, context: float) -> None:
        """How a step differs from others of its kind, by the clock: a pace that is followed would hide it."""
        longer = context - cost.context
        more = min(clocked, tuning.INTERRUPTED_FACTOR * cost.clocked) - cost.clocked
        self._covariance += more * longer - self._covariance / tuning.SLOPE_MEMORY_STEPS
        self._variance += longer**2 - self._variance / tuning.SLOPE_MEMORY_STEPS


@dataclass(frozen=True, slots=True)
class Company:
    """Everything that a step's cost depends on except k: rows, how many of them draft, and with which drafters."""

    num_rows: int
    num_drafting: int
    drafters: tuple[str, ...]

    @classmethod
    def of(cls, wishes: Sequence[DecodingRow]) -> Company:
        """The company of some rows; large numbers are rounded, so that alike ones share their costs."""
        names = [wish.drafter for wish in wishes if wish.most]
        return cls(_bucket(len(wishes)), _bucket(len(names)), tuple(sorted(set(names))))

    def distance(self, other: Company) -> int:
        """How unlike two companies of the same drafters are."""
        return abs(self.num_rows - other.num_rows) + abs(self.num_drafting - other.num_drafting)


def _bucket(num: int) -> int:
    """The number itself while it is small, then rounded down to three binary digits."""
    step = 1 << max(num.bit_length() - 3, 0) if num > tuning.EXACT_ROWS else 1
    return num // step * step


@dataclass(slots=True)
class StepCosts:
    """Seconds of a step by company and tokens drafted, plain steps by rows alone.

    Attributes:
        pace: what a step takes now over what it usually takes.
    """

    pace: float = 1.0
    _plain_slope: Slope = field(default_factory=Slope)
    _slope: Slope = field(default_factory=Slope)  # of steps that draft: drafts read their contexts, too
    _plain: dict[int, Cost] = field(default_factory=dict)
    _drafting: dict[Company, dict[float, Cost]] = field(default_factory=dict)
    _last: dict[Company | int, dict[int, int]] = field(default_factory=dict)  # plain ones by rows
    _reading: dict[tuple[str, ...], tuple[float, int, int]] = field(default_factory=dict)  # seconds, tokens, times
    _shares: dict[tuple[Company, int], tuple[float, float]] = field(default_factory=dict)  # of drafts, of whole steps

    def plain(self, company: Company) -> Cost:
        """Of a step in which none of these rows drafts."""
        return self._plain.get(company.num_rows, Cost())

    @property
    def num_plain(self) -> int:
        """Plain steps measured, of any number of rows."""
        return sum(cost.num for cost in self._plain.values())

    def add(self, company: Company, k: int, steps: Sequence[Sample], numbers: range) -> None:
        """Learn the costs of steps. If they are known already, the steps first tell the machine's current pace.

        Args:
            company: their rows.
            k: most that one of them was to draft; 0 is a plain step.
            steps: what each took.
            numbers: of the steps in a row that these are some of.
        """
        self._last.setdefault(company if k else company.num_rows, {})[k] = numbers[-1]
        if k:
            costs, of_kind = self._drafting.setdefault(company, {}), self._slope
        else:
            costs, of_kind = {_PLAIN: self._plain.setdefault(company.num_rows, Cost())}, self._plain_slope
        for drafted, seconds, context in steps:
            shared = _shared(drafted) if k else _PLAIN
            cost = costs.get(shared)
            if cost is None:
                cost = costs[shared] = Cost()
            if numbers[0] - 1 - cost.seen > tuning.OLD_AFTER_STEPS:
                cost.num = min(cost.num, tuning.OLD_MEMORY_STEPS)
            cost.seen = numbers[-1]
            usual = seconds / self.pace
            if cost.is_trusted:
                surprise = usual / cost.at(context, self._slope_of(k > 0))
                surprise = min(max(surprise, 1 / tuning.INTERRUPTED_FACTOR), tuning.INTERRUPTED_FACTOR)
                self.pace *= surprise ** (1 / tuning.PACE_MEMORY_STEPS)
                of_kind.add(cost, seconds, context)
            cost.add(usual, drafted if k else _PLAIN, context, seconds)

    def add_reading(self, company: Company, num_tokens: int, seconds: float) -> None:
        """By how much a step took longer, in which its drafters first read tokens that they had not drafted."""
        more, tokens, times = self._reading.get(company.drafters, (0.0, 0, 0))
        self._reading[company.drafters] = more + seconds, tokens + num_tokens, times + 1

    def add_shares(self, k: int, steps: Sequence[tuple[Company, float, float]]) -> None:
        """Which part of steps their drafts took: of each its company, its seconds and its drafts' seconds."""
        for company, seconds, drafting in steps:
            of_drafts, of_steps = self._shares.get((company, k), (0.0, 0.0))
            fade = 1 - 1 / tuning.COST_MEMORY_STEPS
            self._shares[company, k] = fade * of_drafts + drafting, fade * of_steps + seconds

    def reading(self, company: Company, num_tokens: int) -> float:
        """Seconds for its drafters to read so many tokens; 0 where that was not seen yet."""
        seconds, tokens, _ = self._reading.get(company.drafters, (0.0, 1, 0))
        return max(seconds, 0.0) / tokens * num_tokens

    def knows_reading(self, company: Company) -> bool:
        """Whether `reading` was seen often enough; the first time is a model's first forward."""
        return self._reading.get(company.drafters, (0.0, 1, 0))[2] >= tuning.TRUSTED_MEASUREMENTS

    def last(self, company: Company) -> dict[int, int]:
        """By k, the step in which it was last tried."""
        return self._last.get(company.num_rows, {}) | self._last.get(company, {})

    def deepest(self, company: Company) -> int:
        """The largest k tried with these drafters, in any company; 0 if none was."""
        alike = [tried for other, tried in self._last.items() if getattr(other, "drafters", None) == company.drafters]
        return max((k for tried in alike for k in tried), default=0)

    def is_known(self, company: Company) -> bool:
        """Whether a plain step of this batch size was measured, and any with these drafters of about as many rows.

        What drafts cost many rows, in proportion, says little of what they cost one.
        """
        return company.num_rows in self._plain and any(
            other.drafters == company.drafters
            and company.num_rows <= tuning.ALIKE_ROWS_FACTOR * other.num_rows
            and other.num_rows <= tuning.ALIKE_ROWS_FACTOR * company.num_rows
            and any(cost.is_trusted for cost in costs.values())
            for other, costs in self._drafting.items()
        )

    def _slope_of(self, drafts: bool) -> float:
        """Seconds for a token of the contexts; a step that drafts reads them for the target, too."""
        plain = self._plain_slope.seconds
        return max(plain, self._slope.seconds) if drafts else plain

    def plain_seconds(self, company: Company, context: float) -> float:
        """Seconds now of a step in which none of these rows drafts, at contexts of so many tokens."""
        return self._plain_at(company.num_rows, context) * self.pace

    def seconds(self, company: Company, drafting: Sequence[float], context: float) -> list[float]:
        """Seconds now, by k = 0, 1, …: measured, borrowed from the nearest company, or on a line.

        Where rows draft less than k now and then, what they draft together spreads about its mean, the less the more
        they are: E[t(mean of n)] = t(mean) + (E[t(one)] - t(mean)) / n, up to t's second derivative.

        Args:
            company: the rows.
            drafting: P(at least j tokens are drafted for one of those that may draft), j = 1, 2, …
            context: tokens of all rows' contexts.
        """
        means = list(accumulate(drafting))
        is_sure = all(share >= 1 for share in drafting)
        wanted = means if is_sure else [0.0, *means, *range(1, len(drafting) + 1)]
        costs = self._measured(company)
        known, at = self._not_falling(company, context), {shared: cost.drafted for shared, cost in costs.items()}
        if any(_shared(tokens) not in known for tokens in wanted):
            alike = [other for other in self._drafting if other.drafters == company.drafters and other != company]
            for other in sorted(alike, key=company.distance):
                costs = self._measured(other)
                lent = self._not_falling(other, context)
                both = known.keys() & lent.keys()
                if both:
                    scale = fmean(known[shared] / lent[shared] for shared in both)
                    at = {shared: cost.drafted for shared, cost in costs.items()} | at
                    known |= {shared: seconds * scale for shared, seconds in lent.items() if shared not in known}
        line = sorted((at[shared], seconds * self.pace) for shared, seconds in known.items())
        plain, usual = line[0][1], [_on_line(line, tokens) for tokens in means]
        if is_sure:
            return [plain, *self._with_drafts(company, plain, usual)]
        alone = [_on_line(line, tokens) for tokens in range(len(drafting) + 1)]
        spread = accumulate(map(mul, drafting, map(sub, alone[1:], alone)), initial=alone[0])
        next(spread)
        usual = [mean + (one - mean) / company.num_drafting for mean, one in zip(usual, spread, strict=True)]
        return [plain, *self._with_drafts(company, plain, usual)]

    def _with_drafts(self, company: Company, plain: float, seconds: list[float]) -> Iterator[float]:
        """Seconds by k = 1, 2, …, but at least a plain step's and the drafts' part of steps of that k beside it.

        Both are of the same steps. Beside a load, means of different ones say little, and drafts would seem to be free.
        """
        for k, its in enumerate(seconds, 1):
            of_drafts, of_steps = self._shares.get((company, k), (0.0, 1.0))
            yield max(its, plain / (1 - min(of_drafts / of_steps, tuning.DRAFT_SHARE_MOST)))

    def _plain_at(self, num_rows: int, context: float) -> float:
        """Seconds of a plain step at the usual pace: not more than one of more rows takes that was measured as often.

        A number of rows that seldom stays for long, as where one ended and the next is still read, is measured in bad
        moments alone, and any draft would look good beside it.
        """
        own, slope = self._plain.get(num_rows, Cost()), self._slope_of(False)
        known = (cost for rows, cost in self._plain.items() if rows >= num_rows and cost.num >= own.num)
        return min((cost.at(context, slope) for cost in known), default=0.0)

    def _measured(self, company: Company) -> dict[float, Cost]:
        """By tokens drafted, what was measured often enough."""
        measured = {shared: cost for shared, cost in self._drafting.get(company, {}).items() if cost.is_trusted}
        plain = self._plain.get(company.num_rows)
        return measured if plain is None else {_PLAIN: plain} | measured

    def _not_falling(self, company: Company, context: float) -> dict[float, float]:
        """Seconds; no step takes less than one that drafts less, and where measurements say so, both have their mean.

        Isotonic regression by pooling adjacent violators, weighted by the number of measurements.
        """
        pools: list[tuple[float, int, list[float]]] = []  # mean seconds, measurements, what shares them
        slope = self._slope_of(True)
        for shared, cost in sorted(self._measured(company).items()):
            is_plain = shared == _PLAIN
            seconds = self._plain_at(company.num_rows, context) if is_plain else cost.at(context, slope)
            num, together = min(cost.num, tuning.COST_MEMORY_STEPS), [shared]
            while pools and pools[-1][0] > seconds:
                lower, more, others = pools.pop()
                seconds = (lower * more + seconds * num) / (more + num)
                num, together = num + more, others + together
            pools.append((seconds, num, together))
        return {shared: seconds for seconds, _, together in pools for shared in together}


def _shared(drafted: float) -> float:
    """The numbers of drafted tokens that share a measurement. 0, a search without a find, is on its own."""
    return max(round(drafted / tuning.DRAFTED_GRAIN), 1) * tuning.DRAFTED_GRAIN if drafted else 0.0


def hoped(seconds: Sequence[float], k: int, deepest: int) -> float:
    """Seconds at k, or on a line of other k if that is less: what was measured in a bad moment is measured again.

    Where only k = 1 was tried so far, further tokens are hoped to cost nothing: a line through it and a plain step
    would have each of them pay once more for what drafting at all costs.
    """
    if not k:
        return seconds[0]
    if k > deepest == 1:
        return seconds[1]
    before = seconds[k - 1]
    ahead = before + max(before - seconds[k - 2], 0.0) if k > 1 else inf
    between = (before + seconds[k + 1]) / 2 if k + 1 < len(seconds) else inf
    return min(seconds[k], ahead, between)


def _on_line(known: Sequence[tuple[float, float]], drafted: float) -> float:
    """Seconds: known, or on the line between neighbours, or on that through the last two, but not falling.

    `known` are tokens drafted and seconds, ascending.
    """
    above = bisect_left(known, (drafted,))
    if above < len(known):
        high, most = known[above]
        if not above or high == drafted:
            return most
        low, least = known[above - 1]
        return least + (most - least) / (high - low) * (drafted - low)
    low, least = known[-1]
    before = next((one for one in reversed(known) if one[0] <= low - tuning.DRAFTED_GRAIN / 2), None)
    if before is None:
        return least
    return max(least + (least - before[1]) / (low - before[0]) * (drafted - low), least)
