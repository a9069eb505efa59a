"""The adaptive depth: as many drafted tokens as pay, none where none do.

It learns from the engine's own clocks what steps cost, and from each request's accepted tokens what they give, and
takes the k of the most tokens per second, 0 included:

    (R + Σ_i Σ_{j ≤ k} s_i(j)) / t(k)   R rows, s_i(j) = P(at least j of row i's drafted tokens are accepted),
                                        t(k) seconds of a step in which k are asked for

Its decisions rest on the past: no token of the step, drafted or sampled, can change its k. But clocks
differ from run to run, so where text depends on k (sampling in every mode but gumbel) it differs too.

Now and then a step is spent on a k that is not the best (exploring), for at most `EXPLORATION_SHARE` of the time, and
of the time that plain decoding would have taken; the first look at a draft alone may take more, and is for some rows of
a large batch. It waits until the time seen and the tokens still asked for are enough that it will have been little,
and ends early if a step with the draft takes many times what a plain one takes. A draft has to read first what it did
not draft itself, which is part of what a look costs: where that is much, requests that just began are looked at. What
soon ends is not read. `tuning` holds the constants.

To decide takes Python that a small model's step would feel, so a decision holds for some steps and what they took is
learned from afterwards; one to draft nothing outlives the rows that it was made for. What deciding takes is no part of
a step's cost, for it falls into one of many; exploring is charged with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, itemgetter
from statistics import fmean
from time import perf_counter

from specdec_cli.engine.depth import tuning
from specdec_cli.engine.depth.acceptance import Acceptance, Outcome
from specdec_cli.engine.depth.costs import Company, Cost, Sample, StepCosts, hoped
from specdec_cli.engine.depth.depth import DecodingRow

_Step = tuple[Company, Sequence[DecodingRow], float, float, int, Outcome | None]
"""Its rows' company, its rows, seconds, its drafts' of them, undisturbed steps before it, None if it was plain.

Another kind of step disturbs, and so does a prompt; a step in which one is fed has -1.
"""


@dataclass(slots=True)
class _Plan:
    """The results of some steps, mostly of the same rows, and those steps."""

    decided_for: Company
    company: Company  # this and the next two: of the step that is made
    rows: list[int]  # sequences
    is_pure: bool
    num_left: int = 1  # steps that it still holds for
    num_held_back: int = 0  # steps more, once there are as many rows again as it was decided for
    k: int = 0
    drafting: Sequence[DecodingRow] = ()  # rows that may be drafted for
    drafted_for: frozenset[int] = frozenset()  # sequences that are
    num_unread: int = 0  # tokens that its drafters read before they draft
    best_rate: float | None = None  # tokens a second and row that the best k would give
    is_exploring: bool = False
    is_first_look: bool = False
    most_seconds: float = 0.0  # that exploring is charged with for a step
    outlives: bool = False  # whether nothing would be drafted for requests of which nothing is known either
    reading_first: float = 0.0  # seconds that drafters would read before a look, which had to wait for that, too
    earned: float = 1.0  # seconds that exploring may lose more with each step
    wishes: Sequence[DecodingRow] = ()  # of the step that is made
    ks: list[int] = field(default_factory=list)
    # Of steps not learned from yet:
    num_steps: int = 0
    seconds: float = 0.0
    steps: deque[_Step] = field(default_factory=deque)  # all, or of plain ones the last


@dataclass(frozen=True, slots=True)
class Account:
    """The time that exploring cost.

    Attributes:
        seconds: of all steps seen.
        exploring_seconds: what the steps that explored lost against the best k, and what deciding to took; negative
            where they won.
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
    _drafted_for: frozenset[int] = frozenset()  # sequences, in the last step learned from
    _num_alike: int = 0  # steps since the last one of another kind or with a prompt
    _own_seconds: float = 0.0  # that this took, of the step that is made
    _deciding: Cost = field(default_factory=Cost)  # seconds of a decision, learning what was before it included
    _plan: _Plan | None = None
    _costs: StepCosts = field(default_factory=StepCosts)
    _acceptance: Acceptance = field(default_factory=Acceptance)
    _read: dict[int, int] = field(default_factory=dict)  # tokens of a sequence that its drafter has read
    _dear: dict[tuple[str, ...], float] = field(default_factory=dict)  # seconds of a step with drafts, of an ended look
    _ended: list[int] = field(default_factory=list)  # sequences to be dropped once their last steps are learned from

    @property
    def account(self) -> Account:
        """The time that exploring has cost so far."""
        self._learn()
        return Account(self._spent, self._explored, self._num_exploring)

    def choose(self, wishes: Sequence[DecodingRow], is_pure: bool) -> list[int]:
        """The best k for every row, within its own limit; now and then another one, to measure it."""
        plan, self._own_seconds = self._plan, 0.0
        rows = list(map(_HANDLE, wishes))
        if plan is None or not plan.num_left or plan.is_pure != is_pure or plan.rows != rows:
            begin = perf_counter()
            if plan is None or not self._outlives(plan, rows, wishes, is_pure):
                self._learn()
                plan = self._plan = self._decide(wishes, is_pure)
                self._deciding.add(perf_counter() - begin, 0.0, 0.0, 0.0)
            elif rows:
                plan.company = Company.of(wishes)
            plan.rows, plan.is_pure, plan.ks = rows, is_pure, [0] * len(rows)
            self._own_seconds = perf_counter() - begin
        plan.num_left -= 1
        plan.wishes = wishes
        if plan.k:
            plan.ks = [min(plan.k, wish.most) if wish.handle in plan.drafted_for else 0 for wish in wishes]
        return plan.ks

    def observe(self, seconds: float, given: Mapping[int, tuple[int, int]], draft_seconds: float = 0.0) -> None:
        """Keep what the step took and gave; it is learned from before the next decision."""
        plan = self._plan
        assert plan is not None, "a step is chosen before it is observed"
        self._spent += seconds
        if not plan.rows:
            self._num_alike = 0
            return
        seconds -= self._own_seconds
        num_alike = self._num_alike if plan.is_pure else -1
        outcome = (plan.wishes, plan.ks, given) if plan.k else None
        plan.steps.append((plan.company, plan.wishes, seconds, draft_seconds, num_alike, outcome))
        plan.num_steps += 1
        plan.seconds += seconds
        if plan.is_first_look and plan.num_steps == tuning.FIRST_LOOK_STEPS_LEAST:
            self._end_if_dear(plan)
        self._num_alike = num_alike + 1

    def forget(self, handle: int) -> None:
        """A sequence ended or will be read again. Its drafter's pool keeps what it learned."""
        self._ended.append(handle)

    def _outlives(self, plan: _Plan, rows: Sequence[int], wishes: Sequence[DecodingRow], is_pure: bool) -> bool:
        """Whether a decision holds for these rows, too; and for how long, which it sets.

        It does where some ended, for a while; one to draft nothing also where there are about as many and no look at
        them is due.
        """
        if not plan.num_left or (plan.is_exploring and not is_pure):
            return False
        if not rows:  # prompts alone are fed
            return True
        if not plan.drafting and any(map(_MOST, wishes)):
            return False
        company = Company.of(wishes)
        if set(plan.rows).issuperset(rows):
            if company != plan.decided_for:
                held_back = max(plan.num_left - tuning.HELD_WHERE_ROWS_ENDED_MOST, 0)
                plan.num_left -= held_back
                plan.num_held_back += held_back
            return True
        if plan.k or not plan.outlives or company != plan.decided_for:
            return False
        plan.num_left, plan.num_held_back = plan.num_left + plan.num_held_back, 0
        reading = self._costs.reading(plan.company, self._unread([wish for wish in wishes if wish.most]))
        if reading < plan.reading_first:  # it need not wait for what it was to read of others
            plan.num_left = max(plan.num_left - int((plan.reading_first - reading) / plan.earned), 0)
            plan.reading_first = reading
        return plan.num_left > 0

    def _decide(self, wishes: Sequence[DecodingRow], is_pure: bool) -> _Plan:
        company = Company.of(wishes)
        plan = _Plan(company, company, list(map(_HANDLE, wishes)), is_pure)
        plan.drafting = [wish for wish in wishes if wish.most]
        num_plain = self._costs.plain(plan.company).num
        if not plan.drafting:
            plan.num_left, plan.outlives = tuning.HELD_AT_REST_STEPS_MOST, True
        elif self._costs.is_known(plan.company):
            self._choose_best(plan, wishes)
        elif num_plain < tuning.FIRST_LOOK_PLAIN_KNOWN:
            plan.num_left = 2 * (tuning.FIRST_LOOK_PLAIN_KNOWN - num_plain)
        else:
            self._look_first(plan, wishes)
        self._acceptance.meet(wishes)
        if plan.k:
            plan.drafted_for = frozenset(map(_HANDLE, plan.drafting))
            plan.num_unread = self._unread(plan.drafting)
            self._read |= {wish.handle: wish.length for wish in plan.drafting}
        else:
            plan.steps = deque(maxlen=tuning.LEARNED_STEPS)
        if bool(plan.k) != bool(self._drafted_for) or not plan.drafted_for <= self._drafted_for:
            self._num_alike = 0
        return plan

    def _choose_best(self, plan: _Plan, wishes: Sequence[DecodingRow]) -> None:
        """The k of the most tokens a second, or one to explore, where it is known what steps cost."""
        most, unread = max(map(_MOST, wishes)), self._unread(plan.drafting)
        seconds = self._costs.seconds(plan.company, self._acceptance.drafting(plan.drafting, most), _context(wishes))
        tokens = self._acceptance.tokens(wishes, most)
        known = min(most, tuning.DEEPER_FACTOR * max([tuning.FIRST_K, *self._costs.last(plan.company)]))
        k = max(range(known + 1), key=lambda one: tokens[one] / seconds[one])
        margin = tuning.MARGIN_TO_KEEP if self._drafted_for else tuning.MARGIN_TO_BEGIN
        if tokens[k] / seconds[k] < (1 + margin) * tokens[0] / seconds[0]:
            k = 0
        reading = self._costs.reading(plan.company, unread)
        # What a step of k saves: plain decoding's time for its tokens, less its own.
        num_left = sum(wish.left for wish in plan.drafting) / (len(plan.drafting) * tokens[k] / tokens[0])
        saved = seconds[0] * tokens[k] / tokens[0] - seconds[k]
        if k and reading > min(tuning.REPAID_WITHIN_STEPS, num_left) * saved:
            k = 0
        plan.best_rate = tokens[k] / seconds[k] / len(wishes)
        look = self._look(plan.company, k, tokens, seconds, reading) if plan.is_pure else None
        plan.num_left = self._num_steps(k, seconds[0]) if look is None else look[1]
        plan.outlives = not k and _is_hopeless(self._acceptance.tokens(wishes, most, is_new=True), seconds)
        plan.reading_first, plan.earned = reading, tuning.EXPLORATION_SHARE * seconds[0]
        plan.k, plan.is_exploring = (k, False) if look is None else (look[0], True)
        plan.most_seconds = tuning.INTERRUPTED_FACTOR * seconds[plan.k]
        if plan.k and unread:  # which is exploring's cost, too; an interruption is not
            usual = seconds[plan.k] + reading
            is_known = self._costs.knows_reading(plan.company)
            plan.most_seconds = (tuning.SLOWEST_FACTOR if is_known else tuning.REPAID_WITHIN_STEPS) * usual

    def _look_first(self, plan: _Plan, wishes: Sequence[DecodingRow]) -> None:
        """A first look at a draft, where plain steps are known and nothing else."""
        seconds = self._costs.plain_seconds(plan.company, _context(wishes))
        plan.best_rate, plan.most_seconds = 1 / seconds, tuning.SLOWEST_FACTOR * seconds
        left = sum(wish.left for wish in plan.drafting) / len(plan.drafting)
        cost = tuning.FIRST_LOOK_PLAIN_STEPS * seconds + self._deciding_to_look
        cost += tuning.LOOK_STEPS * self._dear.get(plan.company.drafters, 0.0)
        if cost > tuning.FIRST_LOOK_SHARE * (self._spent + left * seconds):
            plan.num_left = max(int(left), 1)
        elif plan.is_pure:
            self._explored += self._deciding_to_look
            plan.drafting = sorted(plan.drafting, key=_LENGTH)[: tuning.FIRST_LOOK_ROWS]
            plan.k, plan.is_exploring = min(max(map(_MOST, wishes)), tuning.FIRST_K), True
            plan.is_first_look = True
            plan.num_left = tuning.LOOK_STEPS

    def _end_if_dear(self, plan: _Plan) -> None:
        """End a first look at a draft whose steps take far longer than plain ones, until more time was seen."""
        assert plan.best_rate is not None, "a first look follows plain steps"
        shortest = min(seconds for _, _, seconds, *_ in plan.steps)
        if shortest * plan.best_rate > tuning.FIRST_LOOK_DEAR:
            self._dear[plan.decided_for.drafters] = shortest
            plan.num_left = 0

    def _unread(self, wishes: Sequence[DecodingRow]) -> int:
        """Tokens that drafters would have to read before they draft for these rows."""
        read, drafted_for = self._read, self._drafted_for
        return sum(wish.length - read.get(wish.handle, 0) for wish in wishes if wish.handle not in drafted_for)

    def _learn(self) -> None:
        """Learn from the steps of a decision that were not learned from yet, all at once: it must cost little."""
        plan = self._plan
        if plan is not None and plan.steps:
            self._learn_from(plan)
        for handle in self._ended:
            self._acceptance.forget(handle)
            self._read.pop(handle, None)
        self._drafted_for = self._drafted_for.difference(self._ended)
        self._ended.clear()

    def _learn_from(self, plan: _Plan) -> None:
        self._now += plan.num_steps
        numbers = range(self._now - plan.num_steps + 1, self._now + 1)
        self._learn_reading(plan)
        drafted: list[float | None] = [0.0] * len(plan.steps)
        num_tokens: float = plan.num_steps
        if plan.k:
            drafted, num_tokens = self._acceptance.learn([outcome for *_, outcome in plan.steps if outcome])
            self._costs.add_shares(
                plan.k, [(one, seconds, drafting) for one, _, seconds, drafting, num, _ in plan.steps if num > 0]
            )
        self._account(plan, num_tokens)
        for company, group in groupby(self._settled(plan, drafted), itemgetter(0)):
            self._costs.add(company, plan.k, [step for _, step in group], numbers)
        plan.num_steps = plan.num_unread = 0
        plan.seconds = 0.0
        plan.steps.clear()

    def _learn_reading(self, plan: _Plan) -> None:
        """How long drafters read what they had not drafted, which a first step waits for; and how far they are."""
        _, _, first, _, num_alike, _ = plan.steps[0]
        later = [seconds for _, _, seconds, _, num_before, _ in plan.steps if num_before > 0]
        if plan.num_unread and not num_alike and later:
            longer = min(first, plan.most_seconds) - fmean(later)
            self._costs.add_reading(plan.decided_for, plan.num_unread, longer)
        *_, outcome = plan.steps[-1]
        wishes = outcome[0] if outcome else ()
        read = {wish.handle: wish.length for wish in wishes if wish.handle in plan.drafted_for}
        self._read |= read
        self._drafted_for = frozenset(read)

    def _settled(self, plan: _Plan, drafted: Sequence[float | None]) -> list[tuple[Company, Sample]]:
        """The latest steps that tell what one costs, by company."""
        settled: list[tuple[Company, Sample]] = []
        num_together = 0
        steps = zip(reversed(drafted), reversed(plan.steps), strict=True)
        for num, (company, wishes, seconds, _, num_alike, _) in steps:
            num_together = max(num_together, num_alike + 1)
            if num is not None and num_alike >= (1 if plan.k else min(tuning.SETTLED_STEPS, num_together // 2)):
                settled.append((company, (num, seconds, _context(wishes))))
            num_together *= num_alike > 0
        return settled[tuning.LEARNED_STEPS - 1 :: -1]

    def _account(self, plan: _Plan, num_tokens: float) -> None:
        """The allowed loss by exploring grows with the time, or with plain decoding's time if that is shorter."""
        as_plain = plan.seconds
        if self._costs.plain(plan.decided_for).num:
            as_plain = num_tokens * self._costs.plain_seconds(plan.decided_for, _context(plan.steps[0][1]))
        self._allowance += tuning.EXPLORATION_SHARE * min(plan.seconds, as_plain)
        if plan.is_exploring and plan.best_rate is not None:
            self._num_exploring += plan.num_steps
            took = sum(min(seconds, plan.most_seconds) for _, _, seconds, *_ in plan.steps)
            self._explored += took - num_tokens / plan.best_rate
            self._explored = max(self._explored, -tuning.EXPLORATION_SHARE * self._spent)

    @property
    def _deciding_to_look(self) -> float:
        """Seconds of two decisions: the first of a look, and the next one."""
        return 2 * self._deciding.seconds

    def _allowed(self, plain_seconds: float) -> float:
        """Seconds that exploring may still lose."""
        return self._allowance + tuning.GRACE_STEPS * plain_seconds - self._explored

    def _num_steps(self, best: int, plain_seconds: float) -> int:
        """For how many steps a decision holds: until the next look, but not for long while little is known.

        Where nothing is drafted, nothing is learned of a draft either: it holds until a look is allowed.
        """
        since = self._now - self._looked
        until_allowed = 0 if since else int(self._lacking / (tuning.EXPLORATION_SHARE * plain_seconds))
        if not best:
            return max(tuning.HELD_AT_REST_STEPS - since, min(until_allowed, tuning.HELD_AT_REST_STEPS_MOST), 1)
        held = max(tuning.HELD_STEPS - since, min(until_allowed, tuning.HELD_STEPS_MOST))
        return max(min(held, self._now // tuning.STEPS_SEEN_FACTOR), 1)

    def _look(
        self, company: Company, best: int, tokens: Sequence[float], seconds: Sequence[float], reading: float
    ) -> tuple[int, int] | None:
        """A k to explore, and for how many steps, if its loss is still allowed; the more often the less it loses."""
        since, before = self._now - self._looked, self._plan
        if before is not None and before.is_exploring and before.num_left and best != before.k < len(tokens):
            return before.k, before.num_left
        if since < tuning.STEPS_BETWEEN_LOOKS:
            return None
        self._looked = self._now
        plain, last = self._costs.plain(company), self._costs.last(company)
        rate = tokens[best] / seconds[best]
        deepest = self._costs.deepest(company)

        def lost(k: int) -> float:  # in a step
            return hoped(seconds, k, deepest) - tokens[k] / rate

        def beside(k: int) -> float:  # whatever the number of steps
            return reading * (k > 0) + self._deciding_to_look

        num_unknown = max(tuning.PLAIN_KNOWN - self._costs.num_plain, 0)
        rarely: float = tuning.STEPS_BETWEEN_PLAIN_LOOKS >> num_unknown
        if not num_unknown:
            longest = tuning.PLAIN_LOOK_STEPS[0] * lost(0) + beside(0)
            rarely = max(rarely, longest / (tuning.EXPLORATION_SHARE * seconds[best]))
        allowed = self._allowed(seconds[0])
        if best and (not plain.is_trusted or self._now - last.get(0, 0) >= rarely):
            self._explored += self._deciding_to_look
            return 0, next((num for num in tuning.PLAIN_LOOK_STEPS if num * lost(0) + beside(0) <= allowed), 1)
        others = [k for k in range(min(len(tokens), tuning.DEEPER_FACTOR * deepest + 1)) if k != best]
        nums = {k: _look_steps(lost(k), self._deciding_to_look) for k in others}
        losses = {k: nums[k] * lost(k) + beside(k) for k in others}
        self._lacking = max(min(losses.values()) - allowed, 0.0)
        affordable = [k for k, each in losses.items() if each <= allowed]
        if not affordable:
            return None
        k = max(affordable, key=lambda k: (self._now - last.get(k, 0)) / max(losses[k], seconds[0] / 8))
        self._explored += self._deciding_to_look
        self._looked += nums[k] - tuning.LOOK_STEPS  # what is longer is no reason to look again sooner
        return k, nums[k]


_HANDLE, _MOST, _LENGTH = attrgetter("handle"), attrgetter("most"), attrgetter("length")


def _context(wishes: Sequence[DecodingRow]) -> int:
    """Tokens of all rows' contexts."""
    return sum(map(_LENGTH, wishes))


def _is_hopeless(tokens: Sequence[float], seconds: Sequence[float]) -> bool:
    """Whether drafting is far from paying at every k."""
    most = tuning.HOPELESS_SHARE * tokens[0] / seconds[0]
    return all(one < most * took for one, took in zip(tokens[1:], seconds[1:], strict=True))


def _look_steps(lost: float, deciding: float) -> int:
    """For how many steps to look where each loses some seconds, and deciding to some more."""
    most = tuning.LOOK_STEPS_MOST
    return most if deciding >= most * lost else max(int(deciding / lost), tuning.LOOK_STEPS)
