"""The adaptive depth: as many drafted tokens as pay, none where none do.

It learns from the engine's own clocks what steps cost, and from each request's accepted tokens what they give, and
takes the k of the most tokens per second, 0 included:

    (R + Σ_i Σ_{j ≤ k} s_i(j)) / t(d(k))   R rows, s_i(j) = P(at least j of row i's drafted tokens are accepted),
                                           d(k) tokens that a row is expected to draft where k are asked for

What it decides by is over when it decides: no token of the step, drafted or sampled, can change its k. But clocks
differ from run to run, so where text depends on k (sampling in every mode but gumbel) it differs too.

Now and then a step is spent on a k that is not the best (exploring), for at most `EXPLORATION` of the time, and of the
time that plain decoding would have taken; the first look at a draft alone may take more, and is for some rows of a
large batch. A draft has to read first what it did not draft itself, which is part of what a look costs: where that is
much, requests that just began are looked at. What soon ends is not read.

To decide takes Python that a small model's step would feel, so a decision holds for some steps and what they took is
learned from afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean

from specdec_cli.engine.costs import INTERRUPTED, Company, Costs, hoped
from specdec_cli.engine.depth import Wish
from specdec_cli.engine.survival import Survival

EXPLORATION = 0.004  # what exploring may lose, of the time
_FIRST_K = 1  # the first one measured: what a slow or bad draft costs is found out at little cost
_FARTHER = 2  # times the deepest k tried so far: beyond, a line through what was measured is not believed
_FIRST_ROWS = 8  # and for so many: to read a large batch's prompts takes a draft long, and of fewer little is seen
_PLAIN_FIRST = 3  # plain steps measured before that: an interrupted one alone would make any draft look good
_MARGIN = 0.04, 0.02  # speculation that seems to gain less than this is not begun but for a look, or not kept on
_REPAID_IN = 32  # steps at most, what a draft has to read before it drafts; else it is left alone
_GRACE_STEPS = 1  # exploring may lose this many plain steps before its share of the time has grown to them
_STEPS_BETWEEN = 8  # from one exploring to the next
# For how many steps a decision holds: at least, and at most until another look is allowed.
_HELD = 8, 16
_HELD_AT_REST = 16, 128  # where no k pays
_LEARNED = 32  # of a decision's steps the last ones tell what they cost: to learn from each takes time, too
_STEPS_SEEN = 8  # that a decision needs behind it for each step that it holds for
# Between looks at plain decoding, which speculation is held against: first less, and more where a look costs much.
_STEPS_BETWEEN_PLAIN = 128
_PLAIN_KNOWN = 7  # plain steps measured, by then
_STEPS_TOGETHER = 3  # a draft has to read first what it did not draft, so its first step after plain ones is no measure
# Steps of a look at plain decoding, the most that are affordable. After a draft's steps or a prompt it takes some until
# a processor's caches are the target's again, so those of the first half are no measure.
_PLAIN_TOGETHER = (8, 3, 1)
_SLOWEST = 3  # a first look's step counts for so many plain ones at most: a model's first forward of all takes long


_Step = tuple[list[int], float, Mapping[int, tuple[int, int]]]
"""What a step was asked for, took and gave: k of each row, seconds, tokens drafted and accepted by sequence."""


@dataclass(slots=True)
class _Plan:
    """What some steps do, for as long as the same rows want the same; and those that did."""

    wishes: Sequence[Wish]
    is_pure: bool
    company: Company
    k: int
    best_rate: float | None  # tokens a second that the best k would give
    most_seconds: float  # that exploring is charged with for a step
    is_exploring: bool
    num_left: int  # steps that it still holds for
    num_unread: int  # tokens that its drafters read before they draft
    drafting: frozenset[int]  # sequences that are drafted for
    context: int  # tokens of all rows' contexts
    ks: list[int] = field(default_factory=list)  # of the step that is made
    steps: list[_Step] = field(default_factory=list)  # not learned from yet


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
    _lacking: float = 0.0  # seconds of it that the last look considered would have needed
    _looked: int = 0
    _drafted_for: frozenset[int] = frozenset()  # sequences, in the last step
    _was_plain: bool = False  # whether the last step learned from was one of plain decoding alone
    _plan: _Plan | None = None
    _costs: Costs = field(default_factory=Costs)
    _pools: dict[str, Survival] = field(default_factory=dict)
    _drafts: dict[str, Survival] = field(default_factory=dict)  # how much of what is asked for a drafter drafts
    _survivals: dict[int, tuple[str, Survival]] = field(default_factory=dict)
    _read: dict[int, int] = field(default_factory=dict)  # tokens of a sequence that its drafter has read

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
        if not plan.k and plan.ks:
            return plan.ks
        plan.ks = [min(plan.k, wish.most) if wish.handle in plan.drafting else 0 for wish in wishes]
        return plan.ks

    def observe(self, seconds: float, given: Mapping[int, tuple[int, int]]) -> None:
        """Keep what the step took and gave; it is learned from before the next decision."""
        assert self._plan is not None, "a step is chosen before it is observed"
        self._plan.steps.append((self._plan.ks, seconds, given))

    def forget(self, handle: int) -> None:
        """A sequence ended; what its drafter's pool learned of it stays."""
        self._learn()
        self._survivals.pop(handle, None)
        self._read.pop(handle, None)

    def _decide(self, wishes: Sequence[Wish], is_pure: bool) -> _Plan:
        most = max((wish.most for wish in wishes), default=0)
        company, context = Company.of(wishes), sum(wish.length for wish in wishes)
        k, rate, longest, is_exploring = 0, None, 0.0, False
        num_steps = 1 if most else _HELD_AT_REST[1]
        drafting = [wish for wish in wishes if wish.most]
        unread = self._unread(drafting)
        if most and self._costs.is_known(company):
            seconds = self._costs.seconds(company, self._drafted(wishes, most), context)
            tokens = self._tokens(wishes, most)
            known = min(most, _FARTHER * max([_FIRST_K, *self._costs.last(company)]))
            k = max(range(known + 1), key=lambda one: tokens[one] / seconds[one])
            margin = _MARGIN[bool(self._drafted_for)]
            if tokens[k] / seconds[k] < (1 + margin) * tokens[0] / seconds[0]:
                k = 0
            reading = self._costs.reading(company, unread)
            # What a step of k saves: plain decoding's time for its tokens, less its own.
            num_left = sum(wish.left for wish in drafting) / (len(drafting) * tokens[k] / tokens[0])
            if k and reading > min(_REPAID_IN, num_left) * (seconds[0] * tokens[k] / tokens[0] - seconds[k]):
                k = 0
            rate = tokens[k] / seconds[k]
            look = self._look(company, k, tokens, seconds, reading) if is_pure else None
            num_steps = self._num_steps(k, seconds[0]) if look is None else look[1]
            k, is_exploring = (k, False) if look is None else (look[0], True)
            longest = INTERRUPTED * seconds[k]
            if k and unread:  # which is exploring's cost, too; an interruption is not
                usual = seconds[k] + reading
                longest = _SLOWEST * usual if self._costs.knows_reading(company) else _REPAID_IN * usual
        elif most and self._costs.plain(company).num < _PLAIN_FIRST:
            num_steps = 2 * (_PLAIN_FIRST - self._costs.plain(company).num)
        elif most:
            # Plain steps are known, nothing else.
            plain = self._costs.plain_seconds(company, context)
            rate, longest = len(wishes) / plain, _SLOWEST * plain
            if is_pure:
                k, is_exploring, num_steps = min(most, _FIRST_K), True, _STEPS_TOGETHER
                drafting = sorted(drafting, key=lambda wish: wish.length)[:_FIRST_ROWS]
                unread = self._unread(drafting)
        for wish in wishes:
            if wish.handle not in self._survivals:
                pool = self._pools.setdefault(wish.drafter, Survival())
                self._survivals[wish.handle] = wish.drafter, Survival(pool)
                self._draft(wish.drafter)
        handles = frozenset(wish.handle for wish in drafting)
        if k:
            self._read |= {wish.handle: wish.length for wish in drafting}
        unread *= k > 0
        return _Plan(wishes, is_pure, company, k, rate, longest, is_exploring, num_steps, unread, handles, context)

    def _unread(self, wishes: Sequence[Wish]) -> int:
        """Tokens that drafters would have to read before they draft for these rows."""
        read, drafted_for = self._read, self._drafted_for
        return sum(wish.length - read.get(wish.handle, 0) for wish in wishes if wish.handle not in drafted_for)

    def _learn(self) -> None:
        """Learn from the steps of a decision that were not learned from yet, all at once: it must cost little."""
        plan = self._plan
        if plan is None or not plan.steps:
            return
        steps, plan.steps = plan.steps, []
        num_unread, plan.num_unread = plan.num_unread, 0
        seconds = [one for _, one, _ in steps]
        numbers = range(self._now + 1, self._now + len(steps) + 1)
        self._now += len(steps)
        self._spent += sum(seconds)
        if num_unread and len(steps) > 1:
            longer = min(seconds[0], plan.most_seconds) - fmean(seconds[1:])
            self._costs.add_reading(plan.company, num_unread, longer)
        if plan.wishes:
            drafted, tokens = self._learn_acceptance(plan, steps)
            contexts = list(accumulate(tokens, initial=plan.context))
            self._account(plan, seconds, contexts[-1] - contexts[0])
            plan.context = contexts[-1]
            is_like_before = plan.drafting <= self._drafted_for if plan.k else self._was_plain
            first = 0 if is_like_before else 1 if plan.k else len(steps) // 2
            latest = list(zip(drafted, seconds, contexts[:-1], strict=True))[max(first, len(steps) - _LEARNED) :]
            measured = [(each, took, context) for each, took, context in latest if each is not None]
            if plan.is_pure and measured:
                self._costs.add(plan.company, plan.k, measured, numbers)
        self._drafted_for = plan.drafting if plan.k else frozenset()
        self._was_plain = plan.is_pure and not plan.k

    def _learn_acceptance(self, plan: _Plan, steps: Sequence[_Step]) -> tuple[list[float | None], list[int]]:
        """What became of drafts.

        Returns:
            By step, tokens drafted over the rows that may draft, None where all of those ended; and all rows' tokens.
        """
        num_rows = len(plan.wishes)
        if not plan.k:
            return [0.0] * len(steps), [num_rows] * len(steps)
        drafted: list[float | None] = []
        tokens = []
        outcomes: Counter[tuple[int, int, int, int]] = Counter()
        for ks, _, given in steps:
            num_drafting = num_drafted = 0
            num_tokens = num_rows
            for wish, asked in zip(plan.wishes, ks, strict=True):
                handle = wish.handle
                if handle in given:
                    num_drafting += wish.most > 0
                    if asked:
                        found, accepted = given[handle]
                        outcomes[handle, asked, found, accepted] += 1
                        num_drafted += found
                        num_tokens += accepted
            drafted.append(num_drafted / num_drafting if num_drafting else None)
            tokens.append(num_tokens)
        of_drafters: Counter[tuple[str, int, int, int]] = Counter()
        for (handle, asked, found, accepted), num in outcomes.items():
            name, survival = self._survivals[handle]
            survival.add(asked, accepted, num)
            of_drafters[name, asked, found, accepted] += num
        for (name, asked, found, accepted), num in of_drafters.items():
            self._pools[name].add(asked, accepted, num)
            self._drafts[name].add(asked, found, num)
        return drafted, tokens

    def _account(self, plan: _Plan, seconds: Sequence[float], num_tokens: int) -> None:
        """What exploring may lose grows with the time, plain decoding's where that would have taken less."""
        total = as_plain = sum(seconds)
        if self._costs.plain(plan.company).num:
            as_plain = num_tokens / len(plan.wishes) * self._costs.plain_seconds(plan.company, plan.context)
        self._allowance += EXPLORATION * min(total, as_plain)
        if plan.is_exploring and plan.best_rate is not None:
            self._num_exploring += len(seconds)
            self._explored += sum(min(one, plan.most_seconds) for one in seconds) - num_tokens / plan.best_rate
            self._explored = max(self._explored, -EXPLORATION * self._spent)

    def _drafted(self, wishes: Sequence[Wish], most: int) -> list[float]:
        """Tokens that a row that drafts is expected to draft, by k = 0 … most."""
        mosts: dict[str, list[int]] = {}
        for wish in wishes:
            if wish.most:
                mosts.setdefault(wish.drafter, []).append(wish.most)
        drafted = [0.0] * (most + 1)
        for name, each in mosts.items():
            total = 0.0
            for j, drafts in enumerate(self._draft(name).curve(most), 1):
                total += drafts * sum(own >= j for own in each)
                drafted[j] += total
        return [total / sum(map(len, mosts.values())) for total in drafted]

    def _draft(self, name: str) -> Survival:
        return self._drafts.setdefault(name, Survival(expected=1.0))

    def _tokens(self, wishes: Sequence[Wish], most: int) -> list[float]:
        """Tokens expected of a step, by k = 0 … most."""
        tokens = [float(len(wishes))] * (most + 1)
        for wish in wishes:
            found = self._survivals.get(wish.handle)
            survival = found[1] if found else self._pools.setdefault(wish.drafter, Survival())
            total = 0.0
            for j, alive in enumerate(survival.curve(most), 1):
                total += alive if j <= wish.most else 0.0
                tokens[j] += total
        return tokens

    def _allowed(self, plain_seconds: float) -> float:
        """Seconds that exploring may still lose."""
        return self._allowance + _GRACE_STEPS * plain_seconds - self._explored

    def _num_steps(self, best: int, plain_seconds: float) -> int:
        """For how many steps a decision holds: until the next look, but not for long while little is known.

        Where nothing is drafted, nothing is learned of a draft either: it holds until a look is allowed.
        """
        since = self._now - self._looked
        until_allowed = 0 if since else int(self._lacking / (EXPLORATION * plain_seconds))
        least, most = _HELD if best else _HELD_AT_REST
        held = max(least - since, min(until_allowed, most), 1)
        return held if not best else max(min(held, self._now // _STEPS_SEEN), 1)

    def _look(
        self, company: Company, best: int, tokens: Sequence[float], seconds: Sequence[float], reading: float
    ) -> tuple[int, int] | None:
        """A k to explore, and for how many steps, if its loss is still allowed; the more often the less it loses."""
        since, before = self._now - self._looked, self._plan
        is_begun = before is not None and before.is_exploring and since < _STEPS_TOGETHER
        if before is not None and is_begun and before.k not in (0, best) and before.k < len(tokens):
            return before.k, _STEPS_TOGETHER - since
        if since < _STEPS_BETWEEN:
            return None
        self._looked = self._now
        plain, last = self._costs.plain(company), self._costs.last(company)
        rate = tokens[best] / seconds[best]
        num_unknown = max(_PLAIN_KNOWN - self._costs.num_plain, 0)
        rarely: float = _STEPS_BETWEEN_PLAIN >> num_unknown
        if not num_unknown:
            loss = _PLAIN_TOGETHER[0] * (seconds[0] - tokens[0] / rate)
            rarely = max(rarely, loss / (EXPLORATION * seconds[best]))
        allowed = self._allowed(seconds[0])
        deepest = self._costs.deepest(company)
        others = [k for k in range(min(len(tokens), _FARTHER * deepest + 1)) if k != best]
        losses = {
            k: _STEPS_TOGETHER * (hoped(seconds, k, deepest) - tokens[k] / rate) + reading * (k > 0) for k in others
        }
        if best and (not plain.is_trusted or self._now - last.get(0, 0) >= rarely):
            return 0, next((n for n in _PLAIN_TOGETHER if n * losses[0] / _STEPS_TOGETHER <= allowed), 1)
        affordable = [k for k, loss in losses.items() if loss <= allowed]
        self._lacking = max(min(losses.values()) - allowed, 0.0)
        if not affordable:
            return None
        k = max(affordable, key=lambda k: (self._now - last.get(k, 0)) / max(losses[k], seconds[0] / 8))
        return k, _STEPS_TOGETHER
