"""What steps cost, from the engine's own clocks: by rows, by how many of them draft with what, and by k.

Costs need not be convex in k, so every k has a measurement of its own, but they do not fall, which tells apart what
noise makes look better; what was not measured yet is borrowed from another batch size, in proportion, or read off a
line between neighbours. A machine that others share is faster at one time than at another; that is told apart from
what a k costs (`Costs.pace`), or a k that was last measured in a good moment would seem the better one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from specdec_cli.engine.depth import Wish

INTERRUPTED = 1.5  # a step that takes so many times what was expected is taken for an interrupted one
_MEMORY = 64  # steps that a mean of seconds looks back on
_PACE_MEMORY = 8  # steps in which the machine's pace is followed
_TRUSTED = 2  # measurements that a cost needs: one alone may have been interrupted


@dataclass(slots=True)
class Cost:
    """A fading mean of seconds at the usual pace; what interrupts the machine now and then moves it little.

    Attributes:
        seconds: the mean.
        num: measurements.
        last: when the last one was, in steps of all.
    """

    seconds: float = 0.0
    num: int = 0
    last: int = 0
    _first: list[float] = field(default_factory=list)

    @property
    def is_trusted(self) -> bool:
        """Whether it was measured often enough."""
        return self.num >= _TRUSTED

    def add(self, seconds: float, now: int) -> None:
        """One more measurement, in step `now`."""
        self.num, self.last = self.num + 1, now
        if self.num <= 3:  # the middle one; of two the smaller
            self._first.append(seconds)
            self.seconds = sorted(self._first)[self.num // 3]
        else:
            self.seconds += (min(seconds, INTERRUPTED * self.seconds) - self.seconds) / min(self.num, _MEMORY)


@dataclass(frozen=True, slots=True)
class Company:
    """What a step's cost depends on beside k: how many rows, how many of them draft, with which drafters."""

    num_rows: int
    num_drafting: int
    drafters: tuple[str, ...]

    @classmethod
    def of(cls, wishes: Sequence[Wish]) -> Company:
        """The company of some rows; numbers above 8 are rounded, so that alike ones share their costs."""
        names = [wish.drafter for wish in wishes if wish.most]
        return cls(_bucket(len(wishes)), _bucket(len(names)), tuple(sorted(set(names))))

    def distance(self, other: Company) -> int:
        """How unlike two companies of the same drafters are."""
        return abs(self.num_rows - other.num_rows) + abs(self.num_drafting - other.num_drafting)


def _bucket(num: int) -> int:
    """The number itself up to 8, then rounded down to three binary digits."""
    step = 1 << max(num.bit_length() - 3, 0) if num > 8 else 1
    return num // step * step


@dataclass(slots=True)
class Costs:
    """Seconds of a step by company and k, plain steps by rows alone.

    Attributes:
        pace: what a step takes now over what it usually takes.
    """

    pace: float = 1.0
    _plain: dict[int, Cost] = field(default_factory=dict)
    _drafting: dict[Company, dict[int, Cost]] = field(default_factory=dict)
    _reading: dict[tuple[str, ...], tuple[float, int]] = field(default_factory=dict)  # seconds and tokens

    def plain(self, company: Company) -> Cost:
        """Of a step in which none of these rows drafts."""
        return self._plain.get(company.num_rows, Cost())

    @property
    def num_plain(self) -> int:
        """Plain steps measured, of any number of rows."""
        return sum(cost.num for cost in self._plain.values())

    def add(self, company: Company, k: int, seconds: float, now: int) -> None:
        """A step's seconds; where its cost is known already, they tell of the machine's pace first."""
        costs = self._drafting.setdefault(company, {}) if k else self._plain
        cost = costs.setdefault(k or company.num_rows, Cost())
        usual = seconds / self.pace
        if cost.is_trusted:
            surprise = min(max(usual / cost.seconds, 1 / INTERRUPTED), INTERRUPTED)
            self.pace *= surprise ** (1 / _PACE_MEMORY)
        cost.add(usual, now)

    def add_reading(self, company: Company, num_tokens: int, seconds: float) -> None:
        """By how much a step took longer, in which its drafters first read tokens that they had not drafted."""
        more, tokens = self._reading.get(company.drafters, (0.0, 0))
        self._reading[company.drafters] = more + seconds, tokens + num_tokens

    def reading(self, company: Company, num_tokens: int) -> float:
        """Seconds for its drafters to read so many tokens; 0 where that was not seen yet."""
        seconds, tokens = self._reading.get(company.drafters, (0.0, 1))
        return max(seconds, 0.0) / tokens * num_tokens

    def last(self, company: Company) -> dict[int, int]:
        """By k, the step in which it was last measured."""
        costs = {0: self.plain(company)} | self._drafting.get(company, {})
        return {k: cost.last for k, cost in costs.items()}

    def is_known(self, company: Company) -> bool:
        """Whether a plain step of this batch size was measured, and any with these drafters at all."""
        return company.num_rows in self._plain and any(
            other.drafters == company.drafters and any(cost.is_trusted for cost in costs.values())
            for other, costs in self._drafting.items()
        )

    def seconds(self, company: Company, most: int) -> list[float]:
        """Seconds now, by k = 0 … most: measured, borrowed from the nearest company, or between neighbours."""
        known = _not_falling(self._measured(company))
        if any(k not in known for k in range(most + 1)):
            alike = [other for other in self._drafting if other.drafters == company.drafters and other != company]
            for other in sorted(alike, key=company.distance):
                lent = _not_falling(self._measured(other))
                shared = known.keys() & lent.keys()
                if shared:
                    scale = fmean(known[k] / lent[k] for k in shared)
                    known |= {k: seconds * scale for k, seconds in lent.items() if k not in known}
        return [_on_line(known, k) * self.pace for k in range(most + 1)]

    def _measured(self, company: Company) -> dict[int, Cost]:
        """By k, what was measured often enough."""
        measured = {k: cost for k, cost in self._drafting.get(company, {}).items() if cost.is_trusted}
        plain = self._plain.get(company.num_rows)
        return measured if plain is None else {0: plain} | measured


def hoped(seconds: Sequence[float], k: int) -> float:
    """Seconds at k, or on a line of other k if that is less: what was measured in a bad moment is measured again."""
    if not k:
        return seconds[0]
    before = seconds[k - 1]
    ahead = before + max(before - seconds[k - 2], 0.0) if k > 1 else before
    between = (before + seconds[k + 1]) / 2 if k + 1 < len(seconds) else ahead
    return min(seconds[k], ahead, between)


def _not_falling(costs: Mapping[int, Cost]) -> dict[int, float]:
    """Seconds by k; no step takes less than one of smaller k, and where measurements say so, both have their mean.

    Isotonic regression by pooling adjacent violators, weighted by the number of measurements.
    """
    pools: list[tuple[float, int, list[int]]] = []  # mean seconds, measurements, the k
    for k, cost in sorted(costs.items()):
        seconds, num, ks = cost.seconds, min(cost.num, _MEMORY), [k]
        while pools and pools[-1][0] > seconds:
            lower, more, others = pools.pop()
            seconds = (lower * more + seconds * num) / (more + num)
            num, ks = num + more, others + ks
        pools.append((seconds, num, ks))
    return {k: seconds for seconds, _, ks in pools for k in ks}


def _on_line(known: Mapping[int, float], k: int) -> float:
    """Seconds at k: known, or on the line between its neighbours, or on that through the last two, but not falling."""
    if k in known:
        return known[k]
    low = max(i for i in known if i < k)
    above = [i for i in known if i > k]
    high = min(above) if above else max((i for i in known if i < low), default=low)
    if low == high:
        return known[low]
    value = known[low] + (known[high] - known[low]) / (high - low) * (k - low)
    return value if above else max(value, known[low])
