"""The adaptive depth: as many drafted tokens as pay, none where none do.

It learns from the engine's own clocks what a step of each k costs, and from each request's accepted tokens what
it gives, and takes the k of the most tokens per second, 0 included:

    (R + Σ_i Σ_{j ≤ k} s_i(j)) / t(k)      R rows, s_i(j) = P(at least j of row i's drafted tokens are accepted)

What it decides by is over when it decides: no token of the step, drafted or sampled, can change its k. But clocks
differ from run to run, so where text depends on k (sampling in every mode but gumbel) it differs too.

Costs need not be convex in k, so every k has a measurement of its own, but they do not fall, which tells apart what
noise makes look better; what was not measured yet is borrowed from another batch size, in proportion, or read off a
line between neighbours. A machine that others share is faster at one
time than at another; that is told apart from what a k costs (`_pace`), or a k that was last measured in a good moment
would seem the better one. Now and then a step is spent on a k that is not the best (exploring), for at most
`EXPLORATION` of the time that plain decoding would have taken.

To decide takes Python that a small model's step would feel, so a decision holds for some steps and what they took is
learned from afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean

from specdec_cli.engine.depth import Wish
from specdec_cli.engine.survival import Survival

EXPLORATION = 0.004  # what exploring may lose, of the time that plain decoding would have taken
_FIRST_K = 1  # the first one measured: what a slow or bad draft costs is found out at little cost
_PLAIN_FIRST = 3  # plain steps before that: an interrupted one alone would make any draft look good
_MARGIN = 0.02  # speculation that seems to gain less than this is left alone
_GRACE_STEPS = 1  # exploring may lose this many plain steps before its share of the time has grown to them
_STEPS_BETWEEN = 8  # from one exploring to the next
_STEPS_AT_REST = 32  # for which a decision holds at most where no k pays
_STEPS_SEEN = 8  # that a decision needs behind it for each step that it holds for
_STEPS_BETWEEN_PLAIN = 128  # at most, first less: it is what speculation is held against
_STEPS_TOGETHER = 3  # a draft has to read first what it did not draft, so its first step after plain ones is no measure
_MEMORY = 64  # steps that a mean of seconds looks back on
_PACE_MEMORY = 8  # steps in which the machine's pace is followed
_TRUSTED = 2  # measurements that a cost needs: one alone may have been interrupted
_INTERRUPTED = 1.5  # a step that takes so many times what was expected is taken for one of these
_SLOWEST = 3  # a first look's step counts for so many plain ones at most: a model's first forward of all takes long


@dataclass(slots=True)
class _Cost:
    """A fading mean of seconds at the usual pace; what interrupts the machine now and then moves it little."""

    seconds: float = 0.0
    num: int = 0
    last: int = 0
    _first: list[float] = field(default_factory=list)

    def add(self, seconds: float, now: int) -> None:
        self.num, self.last = self.num + 1, now
        if self.num <= 3:  # the middle one; of two the smaller
            self._first.append(seconds)
            self.seconds = sorted(self._first)[self.num // 3]
        else:
            self.seconds += (min(seconds, _INTERRUPTED * self.seconds) - self.seconds) / min(self.num, _MEMORY)


@dataclass(frozen=True, slots=True)
class _Company:
    """What a step's cost depends on beside k: how many rows, how many of them draft, with which drafters."""

    num_rows: int
    num_drafting: int
    drafters: tuple[str, ...]

    @classmethod
    def of(cls, wishes: Sequence[Wish]) -> _Company:
        names = [wish.drafter for wish in wishes if wish.most]
        return cls(_bucket(len(wishes)), _bucket(len(names)), tuple(sorted(set(names))))

    def distance(self, other: _Company) -> int:
        return abs(self.num_rows - other.num_rows) + abs(self.num_drafting - other.num_drafting)


def _bucket(num: int) -> int:
    """The number itself up to 8, then rounded down to three binary digits."""
    step = 1 << max(num.bit_length() - 3, 0) if num > 8 else 1
    return num // step * step


@dataclass(slots=True)
class _Plan:
    """What some steps do, for as long as the same rows want the same; and those that did."""

    wishes: Sequence[Wish]
    is_pure: bool
    company: _Company
    k: int
    ks: list[int]
    best_rate: float | None  # tokens a second that the best k would give
    most_seconds: float  # that exploring is charged with for a step
    is_exploring: bool
    num_left: int  # steps that it still holds for
    steps: list[tuple[float, Mapping[int, int]]] = field(default_factory=list)  # not learned from yet


@dataclass(frozen=True, slots=True)
class Account:
    """What exploring cost.

    Attributes:
        seconds: of all steps seen.
        exploring_seconds: what the steps that explored lost against the best k; negative where they won.
        num_exploring: how many steps explored.
    """

    seconds: float
    exploring_seconds: float
    num_exploring: int


@dataclass(slots=True)
class Adaptive:
    """The k of the most tokens per second, one for all rows of a step (each within its own limit)."""

    _spent: float = 0.0
    _explored: float = 0.0
    _num_exploring: int = 0
    _now: int = 0
    _allowance: float = 0.0  # seconds that exploring may lose
    _looked: int = 0
    _previous_k: int = 0
    _pace: float = 1.0  # what a step takes now over what it usually takes
    _plan: _Plan | None = None
    _plain: dict[int, _Cost] = field(default_factory=dict)
    _costs: dict[_Company, dict[int, _Cost]] = field(default_factory=dict)
    _pools: dict[str, Survival] = field(default_factory=dict)
    _survivals: dict[int, tuple[str, Survival]] = field(default_factory=dict)

    @property
    def account(self) -> Account:
        """What exploring cost so far."""
        self._learn()
        return Account(self._spent, self._explored, self._num_exploring)

    def choose(self, wishes: Sequence[Wish], is_pure: bool) -> list[int]:
        """The best k for every row, within its own limit; now and then another one, to measure it."""
        plan = self._plan
        if plan is None or not plan.num_left or plan.is_pure != is_pure or plan.wishes != wishes:
            self._learn()
            plan = self._plan = self._decide(wishes, is_pure)
        plan.num_left -= 1
        return plan.ks

    def observe(self, seconds: float, num_accepted: Mapping[int, int]) -> None:
        """Keep what the step took and gave; it is learned from before the next decision."""
        assert self._plan is not None, "a step is chosen before it is observed"
        self._plan.steps.append((seconds, num_accepted))

    def forget(self, handle: int) -> None:
        """A sequence ended; what its drafter's pool learned of it stays."""
        self._learn()
        self._survivals.pop(handle, None)

    def _decide(self, wishes: Sequence[Wish], is_pure: bool) -> _Plan:
        most = max((wish.most for wish in wishes), default=0)
        company = _Company.of(wishes)
        k, rate, longest, is_exploring, num_steps = 0, None, 0.0, False, 1
        if most and self._is_known(company):
            seconds = self._seconds(company, most)
            tokens = self._tokens(wishes, most)
            k = max(range(most + 1), key=lambda one: tokens[one] / seconds[one])
            if tokens[k] / seconds[k] < (1 + _MARGIN) * tokens[0] / seconds[0]:
                k = 0
            rate = tokens[k] / seconds[k]
            other = self._other(company, k, tokens, seconds) if is_pure else None
            num_steps = self._num_steps(k, other)
            k, is_exploring = (k, False) if other is None else (other, True)
            reads_first = k > 0 and self._previous_k == 0  # which is exploring's cost; an interruption is not
            longest = inf if reads_first else _INTERRUPTED * seconds[k]
        elif most and self._plain.get(company.num_rows, _Cost()).num >= _PLAIN_FIRST:
            # Plain steps are known, nothing else.
            plain = self._plain[company.num_rows].seconds * self._pace
            rate, longest = len(wishes) / plain, _SLOWEST * plain
            if is_pure:
                k, is_exploring, num_steps = min(most, _FIRST_K), True, _STEPS_TOGETHER
        for wish in wishes:
            if wish.handle not in self._survivals:
                pool = self._pools.setdefault(wish.drafter, Survival())
                self._survivals[wish.handle] = wish.drafter, Survival(pool)
        ks = [min(k, wish.most) for wish in wishes]
        return _Plan(wishes, is_pure, company, k, ks, rate, longest, is_exploring, num_steps)

    def _learn(self) -> None:
        """Learn from the steps that were not learned from yet."""
        plan = self._plan
        if plan is None:
            return
        steps, plan.steps = plan.steps, []
        for seconds, num_accepted in steps:
            self._now += 1
            if plan.wishes:
                self._learn_from(plan, seconds, num_accepted)
            self._previous_k = plan.k

    def _learn_from(self, plan: _Plan, seconds: float, num_accepted: Mapping[int, int]) -> None:
        self._spent += seconds
        num_tokens = sum(num_accepted.values()) + len(plan.wishes)
        plain = self._plain.get(plan.company.num_rows)
        as_plain = num_tokens / len(plan.wishes) * plain.seconds * self._pace if plain else seconds
        self._allowance += EXPLORATION * as_plain
        for wish, asked in zip(plan.wishes, plan.ks, strict=True):
            accepted = num_accepted.get(wish.handle)
            if asked and accepted is not None:
                name, survival = self._survivals[wish.handle]
                survival.add(asked, accepted)
                self._pools[name].add(asked, accepted)
        if plan.is_pure and (plan.k == 0 or self._previous_k > 0):
            self._measured_once(self._cost(plan.company, plan.k), seconds)
        if plan.is_exploring and plan.best_rate is not None:
            self._num_exploring += 1
            self._explored += min(seconds, plan.most_seconds) - num_tokens / plan.best_rate
            self._explored = max(self._explored, -EXPLORATION * self._spent)

    def _measured_once(self, cost: _Cost, seconds: float) -> None:
        """Where a cost is known already, a step that took longer tells of the machine's pace first."""
        usual = seconds / self._pace
        if cost.num >= _TRUSTED:
            surprise = min(max(usual / cost.seconds, 1 / _INTERRUPTED), _INTERRUPTED)
            self._pace *= surprise ** (1 / _PACE_MEMORY)
        cost.add(usual, self._now)

    def _cost(self, company: _Company, k: int) -> _Cost:
        costs = self._costs.setdefault(company, {}) if k else self._plain
        return costs.setdefault(k or company.num_rows, _Cost())

    def _is_known(self, company: _Company) -> bool:
        """Whether a plain step of this batch size was measured, and any with these drafters at all."""
        return company.num_rows in self._plain and any(
            other.drafters == company.drafters and any(cost.num >= _TRUSTED for cost in costs.values())
            for other, costs in self._costs.items()
        )

    def _tokens(self, wishes: Sequence[Wish], most: int) -> list[float]:
        """Tokens expected of a step, by k = 0 … most."""
        tokens = [float(len(wishes))] * (most + 1)
        for wish in wishes:
            found = self._survivals.get(wish.handle)
            survival = found[1] if found else self._pools.setdefault(wish.drafter, Survival())
            total = 0.0
            curve = survival.curve(wish.most)
            for j in range(most):
                total += curve[j] if j < wish.most else 0.0
                tokens[j + 1] += total
        return tokens

    def _measured(self, company: _Company) -> dict[int, _Cost]:
        """By k, what was measured often enough."""
        measured = {k: cost for k, cost in self._costs.get(company, {}).items() if cost.num >= _TRUSTED}
        plain = self._plain.get(company.num_rows)
        return measured if plain is None else {0: plain} | measured

    def _seconds(self, company: _Company, most: int) -> list[float]:
        """Seconds now, by k = 0 … most: measured, borrowed from the nearest company, or between neighbours."""
        measured = self._measured(company)
        known = _not_falling(measured)
        if any(k not in known for k in range(most + 1)):
            alike = [other for other in self._costs if other.drafters == company.drafters and other != company]
            for other in sorted(alike, key=company.distance):
                lent = _not_falling(self._measured(other))
                shared = known.keys() & lent.keys()
                if shared:
                    scale = fmean(known[k] / lent[k] for k in shared)
                    known |= {k: seconds * scale for k, seconds in lent.items() if k not in known}
        return [_on_line(known, k) * self._pace for k in range(most + 1)]

    def _allowed(self, plain_seconds: float) -> float:
        """Seconds that exploring may still lose."""
        return self._allowance + _GRACE_STEPS * plain_seconds - self._explored

    def _num_steps(self, best: int, other: int | None) -> int:
        """For how many steps a decision holds: until the next look, but not for long while little is known.

        Where nothing is drafted, nothing is learned of a draft either: it holds for several looks.
        """
        since = self._now - self._looked
        if other is not None:
            until = _STEPS_TOGETHER - since if other else 1
        else:
            until = (_STEPS_BETWEEN if best else _STEPS_AT_REST) - since
        return max(min(until, self._now // _STEPS_SEEN), 1)

    def _other(self, company: _Company, best: int, tokens: Sequence[float], seconds: Sequence[float]) -> int | None:
        """A k to explore in this step, if its loss is still allowed; each the more often the less it loses."""
        since, before = self._now - self._looked, self._plan
        explored = before.k if before is not None and before.is_exploring and since < _STEPS_TOGETHER else 0
        if explored not in (0, best) and explored < len(tokens):
            return explored
        if since < _STEPS_BETWEEN:
            return None
        self._looked = self._now
        plain = self._plain[company.num_rows]
        last = {k: cost.last for k, cost in self._costs.get(company, {}).items()} | {0: plain.last}
        num_plain = sum(cost.num for cost in self._plain.values())
        if best and (plain.num < _TRUSTED or self._now - plain.last >= _STEPS_BETWEEN_PLAIN >> max(7 - num_plain, 0)):
            return 0
        allowed = self._allowed(seconds[0])
        rate = tokens[best] / seconds[best]
        others = [k for k in range(len(tokens)) if k != best]
        losses = {k: _STEPS_TOGETHER * (_hoped(seconds, k) - tokens[k] / rate) for k in others}
        affordable = [k for k, loss in losses.items() if loss <= allowed]
        if not affordable:
            return None
        return max(affordable, key=lambda k: (self._now - last.get(k, 0)) / max(losses[k], seconds[0] / 8))


def _not_falling(costs: Mapping[int, _Cost]) -> dict[int, float]:
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


def _hoped(seconds: Sequence[float], k: int) -> float:
    """Seconds at k, or on a line of other k if that is less: what was measured in a bad moment is measured again."""
    lower = dict(enumerate(seconds[:k]))
    others = lower | {other: seconds[other] for other in range(k + 1, len(seconds))}
    return min([seconds[k], *(_on_line(known, k) for known in (lower, others) if lower)])


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
