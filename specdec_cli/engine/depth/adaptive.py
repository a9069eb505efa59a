"""The adaptive depth: as many drafted tokens as pay, none where none do.

It learns from the engine's own clocks what steps cost and from accepted tokens what they give, and takes the k of the
most tokens per second, 0 included:

    (R + Σ_i Σ_{j ≤ min(k, k_i)} s_i(j)) / t(k)   R rows, of which row i may draft k_i tokens;
                                                  s_i(j) = P(at least j of its drafted tokens are accepted),
                                                  t(k) seconds of a step in which k are asked for

An estimate is as good as its last measurement, so some steps *probe*: they take a k that is not the best. What they
lose against the best k is charged to a budget, a small share of the time.

Its decisions rest on the past: no token of the step, drafted or sampled, can change its k. But clocks differ from run
to run, so where text depends on k (sampling in every mode but gumbel) it differs too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from specdec_cli.engine.depth.depth import DecodingRow
from specdec_cli.engine.depth.estimates import UNSEEN_ACCEPTANCE, Acceptance, Company, StepCosts

PROBE_SHARE = 0.004
"""Share of the time that probes may lose. That decoding is never much slower than without a draft rests on it."""
FIRST_PROBE_SHARE, FIRST_PROBE_LOSS = 0.03, 2.8
"""A draft is first probed when so many plain steps are within this share of the time seen and the time asked for."""
PROBE_STEPS, NEIGHBOUR_PROBE_STEPS = 3, 2
"""Steps of a probe that begins or stops drafting, and of one of another k. The first step of the former is not
measured: the draft reads the tokens that it did not draft, or caches hold the draft or a prompt."""
FIRST_PROBE_ROWS = 8
"""Rows of a large batch that a draft's first probe is for, those with the least to read: their prompts take long."""
STEPS_BETWEEN_PROBES = 8
"""Steps from one probe to the next."""
DOUBTED_AFTER_STEPS = 8
"""Steps, for each measurement of a plain step, after which another one is due while drafting gains little."""
CHARGED_FACTOR = 2.0
"""A probe is charged with at most so many expected steps for one of its own: the rest is a pause of the machine."""
DEAR_FACTOR = 3.0
"""Plain steps; a probe whose drafts take longer in each step ends early."""
HOPELESS_SHARE = 0.8
"""Share of the best rate; while nothing is drafted, a k of which less is expected is not tried beyond those known."""
MARGIN_TO_BEGIN, MARGIN_TO_KEEP = 0.04, 0.02
"""Shares of plain decoding's rate; a smaller gain does not begin drafting, or does not keep it on."""
READING_MEMORY, READING_FACTOR = 8, 2
"""Beginnings of drafting that the time to read a token looks back on; a step in which drafts read so many times what
they can have drafted is one, too."""
FIRST_READING_SHARE = 0.25
"""Part of the time of a draft's first reading that counts, as its first forward pass takes longer than others."""
REPAID_WITHIN_STEPS = 32
"""Steps within which drafting has to save what the draft reads before it begins."""
HELD_STEPS, HELD_AT_REST_STEPS = 16, 48
"""Steps that a decision to draft holds if the cost of its k is known well, and one not to draft. Between two forward
passes Python finds little of itself in the processor's caches, so deciding and learning in every step slows small
models down."""
SETTLED_STEPS = 8
"""Plain steps in a row after which caches hold nothing of drafts and prompts any more; of fewer, the later half tells
what a plain step costs."""


@dataclass(frozen=True, slots=True)
class Account:
    """The time that probes cost.

    Attributes:
        seconds: of all steps seen.
        exploring_seconds: lost by probes against the best k; negative where they won.
        num_exploring: steps of probes.
    """

    seconds: float
    exploring_seconds: float
    num_exploring: int


@dataclass(slots=True)
class _Probe:
    """A k that is tried for some steps, beside a best one of so many tokens per second."""

    k: int
    num_steps: int
    best_rate: float
    plain_seconds: float
    part: float = 1.0  # of the rows: it is for some of them
    handles: frozenset[int] = frozenset()  # of those


_Step = tuple[Sequence[DecodingRow], list[int], float, float, Mapping[int, tuple[int, int]]]
"""Rows and the k of each, seconds, the drafts' part of them, and tokens drafted and accepted by sequence."""


@dataclass(slots=True)
class Adaptive:
    """The k of the most tokens per second, one for all rows of a step (each within its own limit)."""

    _costs: StepCosts = field(default_factory=StepCosts)
    _acceptance: dict[str, Acceptance] = field(default_factory=dict)  # by drafter
    _read: dict[int, int] = field(default_factory=dict)  # by sequence, tokens that its drafter has read
    _reading: tuple[float, float] = 0.0, 0.0  # seconds for drafters to read tokens that they did not draft, and tokens
    _first: tuple[float, int] | None = None  # of the step that began drafting: seconds, and tokens that were read first
    # The decision, and its steps that were not learned from yet:
    _company: Company = field(default_factory=lambda: Company.of(()))
    _is_pure: bool = True
    _k: int = 0
    _probe: _Probe | None = None
    _expected: float = 0.0  # seconds of a step, reading included
    _num_held: int = 0  # steps that it still holds
    _rows: Sequence[DecodingRow] = ()  # of the step that is made
    _ks: list[int] = field(default_factory=list)
    _steps: list[_Step] = field(default_factory=list)
    _ended: list[int] = field(default_factory=list)  # sequences to forget after these steps
    # All steps that were learned from:
    _is_drafting: bool = False
    _num_alike: int = 0  # since drafting began or stopped, or a prompt was fed
    _now: int = 0
    _probed: int = 0  # the last step of a probe
    _num_probing: int = 0
    _seconds: float = 0.0
    _lost: float = 0.0
    _lacking: float = 0.0  # of the time that probes may lose, for the cheapest one

    @property
    def account(self) -> Account:
        """The time that probes have cost so far."""
        self._learn()
        self._num_held = 0  # a probe in progress ends with its account
        return Account(self._seconds, self._lost, self._num_probing)

    def choose(self, rows: Sequence[DecodingRow], is_pure: bool) -> list[int]:
        """The best k for every row, within its own limit; now and then another one, to measure it."""
        if not self._num_held or is_pure != self._is_pure or len(rows) != len(self._rows):
            self._learn()
            self._rows, self._is_pure, self._company = rows, is_pure, Company.of(rows)
            self._k, self._num_held = self._decide() if self._company.drafters else (0, HELD_AT_REST_STEPS)
        self._num_held -= 1
        self._rows, k = rows, self._k
        if self._probe is not None and self._probe.part < 1:
            self._ks = [min(k, row.most) if row.handle in self._probe.handles else 0 for row in rows]
        else:
            self._ks = [min(k, row.most) for row in rows]
        return self._ks

    def observe(self, seconds: float, given: Mapping[int, tuple[int, int]], draft_seconds: float = 0.0) -> None:
        """Keep what the step took and gave: it is learned from before the next decision."""
        self._steps.append((self._rows, self._ks, seconds, draft_seconds, given))
        if self._probe is not None and _is_dear(self._probe, self._steps):
            self._num_held = 0

    def forget(self, handle: int) -> None:
        """A sequence ended or will be read again."""
        self._num_held = 0
        self._ended.append(handle)

    def _decide(self) -> tuple[int, int]:
        """A k, and for how many steps."""
        seconds = self._costs.seconds(self._company, max(row.most for row in self._rows), _context(self._rows))
        if not seconds:
            return 0, PROBE_STEPS
        if len(seconds) == 1:
            k, num_steps, reading, self._probe = 0, HELD_AT_REST_STEPS, 0.0, self._first_probe(seconds[0])
        else:
            tokens, reading = self._tokens(len(seconds) - 1), self._reading_seconds()
            k = self._best(tokens, seconds, reading)
            self._probe = self._new_probe(k, tokens, seconds, reading)
            num_steps = self._num_steps(k, seconds[0])
        if self._probe is not None:
            k, num_steps = self._probe.k, self._probe.num_steps
        self._expected = seconds[min(k, len(seconds) - 1)] + reading
        return k, num_steps

    def _best(self, tokens: Sequence[float], seconds: Sequence[float], reading: float) -> int:
        best = max(range(len(seconds)), key=lambda k: tokens[k] / seconds[k])
        saved = seconds[0] * tokens[best] / tokens[0] - seconds[best]  # by a step, of plain decoding's time
        if saved < (MARGIN_TO_KEEP if self._k else MARGIN_TO_BEGIN) * seconds[best]:
            return 0
        num_steps = self._left() * tokens[0] / tokens[best]
        return best if reading <= min(REPAID_WITHIN_STEPS, num_steps) * saved else 0

    def _num_steps(self, k: int, plain: float) -> int:
        """Steps that a decision holds: one to draft nothing until a probe is affordable."""
        if k:
            cost = self._costs.of(self._company).get(k)
            return max(min(HELD_STEPS, cost.num // 2), 1) if cost is not None else 1
        until_affordable = int(min(self._lacking / (PROBE_SHARE * plain), HELD_AT_REST_STEPS))
        return max(STEPS_BETWEEN_PROBES - (self._now - self._probed), until_affordable, 1)

    def _first_probe(self, plain: float) -> _Probe | None:
        """The first probe of a draft, once there is time for it."""
        time = self._seconds + self._left() * plain
        if not self._is_pure or FIRST_PROBE_LOSS * plain > FIRST_PROBE_SHARE * time:
            return None
        drafting = sorted((row for row in self._rows if row.most), key=lambda row: row.length)
        handles = frozenset([row.handle for row in drafting[:FIRST_PROBE_ROWS]])
        return _Probe(1, PROBE_STEPS, len(self._rows) / plain, plain, len(handles) / len(drafting), handles)

    def _new_probe(self, best: int, tokens: Sequence[float], seconds: Sequence[float], reading: float) -> _Probe | None:
        """Of the k that the budget allows, the one not measured for the longest time beside what it loses."""
        if not self._is_pure or self._now - self._probed < STEPS_BETWEEN_PROBES:
            self._lacking = 0.0
            return None
        plain, rate, costs = seconds[0], tokens[best] / seconds[best], self._costs.of(self._company)
        # A plain step in advance, and one for all rows together: many of them tell sooner what is accepted.
        grant = (1 + 1 / sum(row.most > 0 for row in self._rows)) * plain
        allowed = PROBE_SHARE * self._seconds + grant - self._lost
        hoped = tokens if best else self._tokens(len(seconds) - 1, 0.0)  # in a short run a second failure would be felt
        due, urgency, self._lacking = None, 0.0, inf
        for k, took in enumerate(seconds):
            is_hopeless = not best and k not in costs and tokens[k] / took < HOPELESS_SHARE * rate
            if k == best or is_hopeless:
                continue
            num, lost = NEIGHBOUR_PROBE_STEPS if k and best else PROBE_STEPS, took - hoped[k] / rate
            if not k and SETTLED_STEPS * lost <= max(allowed, plain):
                num = SETTLED_STEPS
            loss = num * lost + (0.0 if best else reading)
            age = self._now - (costs[k].last if k in costs else 0)
            is_doubted = not k and loss <= plain and age >= DOUBTED_AFTER_STEPS * (costs[0].num if 0 in costs else 0)
            its = inf if is_doubted else age / max(loss, plain / 8)
            self._lacking = min(self._lacking, max(loss - allowed, 0.0))
            if its > urgency and (is_doubted or loss <= allowed):
                due, urgency = _Probe(k, num, rate, plain), its
        return due

    def _learn(self) -> None:
        """Learn from the steps of the last decision."""
        (probe, self._probe), (steps, self._steps) = (self._probe, None), (self._steps, [])
        if bool(self._k) != self._is_drafting:
            self._num_alike, self._is_drafting = 0, self._k > 0
        num_together = self._num_alike + len(steps)
        for rows, ks, seconds, draft_seconds, given in steps:
            self._now, self._seconds = self._now + 1, self._seconds + seconds
            self._num_alike = self._num_alike if self._is_pure else -1
            if self._k and any(ks):
                drafting = [row for row, k in zip(rows, ks, strict=True) if k]
                unread = self._unread(drafting)
                if not self._num_alike or (self._is_pure and unread > READING_FACTOR * (max(ks) + 1) * len(drafting)):
                    self._first = seconds, unread
                elif self._num_alike > 0:
                    self._measure(probe, max(ks), rows, seconds, draft_seconds)
                self._learn_acceptance(drafting, ks, given)
                self._learn_reading(max(ks))
            elif rows and not self._k and self._num_alike >= min(SETTLED_STEPS, num_together // 2):
                self._measure(probe, 0, rows, seconds, 0.0)
            if probe is not None:
                num_tokens = len(rows) + sum(accepted for _, accepted in given.values())
                self._lost += min(seconds, CHARGED_FACTOR * self._expected) - num_tokens / probe.best_rate
            self._num_alike += 1
        if probe is not None and steps:
            self._lost = max(self._lost, -PROBE_SHARE * self._seconds)
            self._num_probing, self._probed = self._num_probing + len(steps), self._now
            if _is_dear(probe, steps):
                rows, ks, seconds, draft_seconds, _ = steps[-1]
                self._measure(probe, max(ks), rows, seconds, draft_seconds)  # for those left
        for handle in self._ended:
            self._read.pop(handle, None)
        self._ended.clear()

    def _measure(
        self, probe: _Probe | None, k: int, rows: Sequence[DecodingRow], seconds: float, draft_seconds: float
    ) -> None:
        """Learn what a step costs; of a probe for some of the rows, what it would have cost for all."""
        if probe is not None and probe.part < 1:
            seconds = max(probe.plain_seconds + (seconds - probe.plain_seconds) / probe.part, seconds)
            draft_seconds /= probe.part
        self._costs.add(self._company, k, seconds, draft_seconds / seconds, _context(rows), self._now)

    def _learn_acceptance(
        self, drafting: Sequence[DecodingRow], ks: Sequence[int], given: Mapping[int, tuple[int, int]]
    ) -> None:
        outcomes: dict[str, list[tuple[int, int]]] = {}
        for row, asked in zip(drafting, filter(None, ks), strict=True):
            self._read[row.handle] = row.length
            if row.handle in given:
                outcomes.setdefault(row.drafter, []).append((asked, given[row.handle][1]))
        for name, each in outcomes.items():
            self._acceptance.setdefault(name, Acceptance()).add(each)

    def _learn_reading(self, k: int) -> None:
        """Learn how long reading took in a first step, once it is known what else takes time."""
        known = self._costs.known(self._company, _context(self._rows)) if self._first is not None else {}
        if self._first is not None and k in known and 0 in known:
            (seconds, num), self._first = self._first, None
            # To read a token takes no longer than to draft one. What did was something else.
            most = max(known[k][0] - known[0][0], 0.0) * self._costs.pace / k * num
            longer = min(max(seconds - known[k][0] * self._costs.pace, 0.0), most)
            longer *= 1.0 if self._reading[1] else FIRST_READING_SHARE
            fade = 1 - 1 / READING_MEMORY
            self._reading = fade * self._reading[0] + longer, fade * self._reading[1] + num

    def _reading_seconds(self) -> float:
        """Seconds that drafters would take to read what they have to before they draft for these rows."""
        seconds, num_tokens = self._reading
        return seconds / num_tokens * self._unread(self._rows) if num_tokens else 0.0

    def _unread(self, rows: Sequence[DecodingRow]) -> int:
        """Tokens that drafters have to read before they draft for rows."""
        return sum(max(row.length - self._read.get(row.handle, 0), 0) for row in rows if row.most)

    def _left(self) -> float:
        """Tokens that a row which drafts may still emit, on average."""
        left = [row.left for row in self._rows if row.most]
        return sum(left) / len(left)

    def _tokens(self, most: int, unseen: float = UNSEEN_ACCEPTANCE) -> list[float]:
        """Tokens expected of a step, by k = 0 … most."""
        gained = [0.0] * most
        for name in self._company.drafters:
            limits = [row.most for row in self._rows if row.drafter == name]
            least = min(limits)
            for j, alive in enumerate(self._acceptance.setdefault(name, Acceptance()).survival(most, unseen)):
                gained[j] += alive * (len(limits) if j < least else sum(limit > j for limit in limits))
        return list(accumulate(gained, initial=float(len(self._rows))))


def _context(rows: Sequence[DecodingRow]) -> int:
    """Tokens of all rows' contexts."""
    return sum([row.length for row in rows])


def _is_dear(probe: _Probe, steps: Sequence[_Step]) -> bool:
    """Whether drafts took so long in each of a probe's steps, the first one among them, that it is better ended."""
    most = DEAR_FACTOR * probe.plain_seconds
    return len(steps) > 1 and all(draft_seconds > most for *_, draft_seconds, _ in steps)
