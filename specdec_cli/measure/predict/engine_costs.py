"""Step costs of another engine, from whole runs at a few k.

Only a step's whole time can be seen from outside, not its parts. Passes without a draft give t0, the seconds of a
plain step. Passes with k drafted tokens give, with N steps of which D drafted T tokens together,

    seconds = N t0 + D a + T b + U c

where a is what drafting at all adds to a step and b what each drafted token adds: its draft pass and one more row to
verify. Passes at two k determine a and b; more of them are fitted by least squares. So a step with k tokens takes
t0 + a + b k seconds, and one in which a draft found nothing takes t0.

With p-min U steps end their drafts with a pass whose token is not verified, for c seconds: the price of a draft pass
alone. No engine counts them, nor the steps that drafted nothing after such a pass: the trace tells both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from specdec_cli.document import Interval
from specdec_cli.draft_shape import DraftShape
from specdec_cli.measure.endpoint.request_counts import CountsSource
from specdec_cli.measure.endpoint.server_counts import ACCEPTED, DRAFTED, DRAFTS, ServerCounts
from specdec_cli.measure.predict.cost import Costs, ProfileLoad, Rounds
from specdec_cli.measure.predict.replay import Replay
from specdec_cli.measure.stats import NUM_RESAMPLES, FloatArray

_NOISE = 0.02
"""Share of a step's time by which two starts of an engine differ without a cause."""


@dataclass(frozen=True, slots=True)
class PassTotals:
    """Decode time and steps of some requests, added up over them.

    Args:
        seconds: from each request's first token to its last.
        num_tokens: output tokens after each request's first.
        num_drafts: steps that drafted.
        num_draft_tokens: drafted tokens.
        num_accepted_tokens: of them, accepted.
        lost_share: share of its time that other programs took; None where it is not known.
        num_discarded: interrupted attempts before it; none is decoded again.
        acceptance_from: source of the counts; None without a draft.
    """

    seconds: float
    num_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    lost_share: float | None = None
    num_discarded: int = 0
    acceptance_from: CountsSource | None = None

    @property
    def num_steps(self) -> int:
        """Steps: each gives one token beside those that it accepts, so those accepted past an end cost none."""
        return max(self.num_tokens - self.num_accepted_tokens, self.num_drafts)


@dataclass(frozen=True, slots=True)
class EngineRun:
    """The passes of one start of an engine at one batch size.

    Args:
        k: tokens drafted in a step; 0 without a draft.
        rounds: R of them, each over other prompts.
        load: average load of the machine in the minute before.
        p_min: with which it drafted.
        replayed: the trace's steps at this k and p-min; None where the engine's counters say everything.
    """

    k: int
    rounds: tuple[PassTotals, ...]
    load: float = 0.0
    p_min: float = 0.0
    replayed: Replay | None = None

    @property
    def shape(self) -> DraftShape:
        """Shape of a step's draft."""
        return DraftShape(self.k, p_min=self.p_min)

    def total(self, name: str) -> float:
        """The sum of a count over all rounds."""
        return float(sum(getattr(totals, name) for totals in self.rounds))

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step."""
        return self.total("seconds") / max(self.total("num_steps"), 1)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one sequence's decoding."""
        return self.total("num_tokens") / self.total("seconds")

    @property
    def counts(self) -> ServerCounts:
        """Counts of speculation, as the engine counts."""
        counts = ServerCounts()
        for totals in self.rounds:
            added = {DRAFTS: totals.num_drafts, DRAFTED: totals.num_draft_tokens, ACCEPTED: totals.num_accepted_tokens}
            counts.add_run(added, totals.num_tokens)
        return counts

    def speedup_over(self, plain: EngineRun) -> Interval:
        """Tokens per second over those without a draft; both runs' rounds are resampled by themselves."""
        point = self.tokens_per_second / plain.tokens_per_second
        num = min(len(self.rounds), len(plain.rounds))
        if num < 2:
            return Interval(point, None, num)
        generator = np.random.default_rng(0)
        drawn = _drawn_rates(self, generator) / _drawn_rates(plain, generator)
        low, high = np.quantile(drawn, (0.025, 0.975))
        return Interval(point, (float(low), float(high)), num)


def _drawn_rates(run: EngineRun, generator: np.random.Generator) -> FloatArray:
    values = np.array([(totals.num_tokens, totals.seconds) for totals in run.rounds], dtype=np.float64)
    sums = values[generator.integers(0, len(values), size=(NUM_RESAMPLES, len(values)))].sum(axis=1)
    return np.asarray(sums[:, 0] / sums[:, 1])


@dataclass(frozen=True, slots=True, eq=False)
class EngineCosts:
    """Costs of steps, fitted to an engine's runs.

    Args:
        plain_seconds: t0.
        base_seconds: a.
        seconds_per_token: b.
        seconds_per_stop: c; None where no run had a p-min.
        costs: the same as the prediction takes it.
        fitted_on: each run's k that the fit rests on, and its error: fitted over measured seconds, less 1.
    """

    plain_seconds: float
    base_seconds: float
    seconds_per_token: float
    seconds_per_stop: float | None
    costs: Costs
    fitted_on: dict[DraftShape, float]

    def step_seconds(self, k: int) -> float:
        """Seconds of a step that drafts k tokens."""
        return self.plain_seconds + (self.base_seconds + self.seconds_per_token * k if k else 0.0)

    @property
    def doubt(self) -> str | None:
        """A sentence where more drafted tokens clearly take less time by the fit; None elsewhere."""
        ks = sorted({0, *(shape.k for shape in self.fitted_on)})
        for fewer, more in pairwise(ks):
            before, after = self.step_seconds(fewer), self.step_seconds(more)
            if after < before * (1 - _NOISE):
                size = self.costs.batch_size
                where = f"with {size} requests at a time, " if size > 1 else ""
                without = f"at k = {fewer}" if fewer else "without a draft"
                message = f"a step takes {1e3 * before:.2f} ms {without} and {1e3 * after:.2f} ms at k = {more}"
                why = "drafting more takes no less time, so the machine's speed changed between the engine's starts"
                return f"{where}by the fitted costs {message}: {why}, and the predictions are unreliable"
        return None

    def error(self, run: EngineRun) -> float:
        """Fitted over measured seconds of a run, less 1."""
        seconds, *counts = _totals(run)
        prices = (self.plain_seconds, self.base_seconds, self.seconds_per_token, self.seconds_per_stop or 0.0)
        return float(np.dot(counts, prices) / seconds - 1)


def fit_costs(
    plain: EngineRun, drafting: Sequence[EngineRun], k_max: int, batch_size: int, load: ProfileLoad, *, is_lookup: bool
) -> EngineCosts:
    """Fit the costs of steps to an engine's runs.

    Args:
        plain: without a draft.
        drafting: at one k or several.
        k_max: largest k that is predicted.
        batch_size: sequences that ran together.
        load: of the machine.
        is_lookup: whether the draft may find nothing, and then costs nothing; another draft costs by what it is asked.
    """
    assert drafting, "costs of drafting need a run that drafts"
    num = min(len(run.rounds) for run in (plain, *drafting))
    whole = _solve(*(_totals(run) for run in (plain, *drafting)))
    by_round = [_solve(*(_totals(run, at) for run in (plain, *drafting))) for at in range(num)]
    tables = [_tables(fitted, k_max, is_lookup) for fitted in by_round]
    rounds = Rounds(*(np.stack(parts) for parts in zip(*tables, strict=True)))
    target, draft, overhead = _tables(whole, k_max, is_lookup)
    seconds = sum(run.total("seconds") for run in (plain, *drafting))
    costs = Costs(k_max, (0,), target, draft, overhead, batch_size, num, seconds, load, rounds)
    has_stops = any(run.p_min for run in drafting)
    made = EngineCosts(*whole[:3], whole[3] if has_stops else None, costs, {})
    made.fitted_on.update({run.shape: made.error(run) for run in drafting})
    return made


def _totals(run: EngineRun, at: int | None = None) -> FloatArray:
    """Seconds, steps, drafting steps, drafted tokens and drafts that ended unsure, of one round or of all."""
    rounds = run.rounds if at is None else run.rounds[at : at + 1]
    rows = [(totals.seconds, totals.num_steps, totals.num_drafts, totals.num_draft_tokens, 0) for totals in rounds]
    sums = np.array(rows, dtype=np.float64).sum(axis=0)
    if run.replayed is not None:
        asked, drafted = run.replayed.steps_by_asked, run.replayed.steps_by_drafted
        passes = np.arange(asked.shape[1])
        unsure = ((asked - drafted) * passes).sum()
        sums[[2, 4]] = sums[1] / run.replayed.num_steps.sum() * np.array([asked[:, 1:].sum(), unsure])
    return np.asarray(sums)


def _solve(plain: FloatArray, *drafting: FloatArray) -> tuple[float, float, float, float]:
    """Solve for t0, a, b and c. Each run counts by its steps' mean, so that one with more steps weighs no more.

    A draft pass alone costs no more than a drafted token: with its row. Without a p-min nothing tells them apart.
    """
    per_step = plain[0] / plain[1]
    rows = np.array([totals / totals[1] for totals in drafting])
    wanted = rows[:, 0] - per_step
    has_stops = rows[:, 4].any()
    has_depths = len({*np.round(rows[:, 3] / np.maximum(rows[:, 2], 1e-9), 9)}) > 1
    columns = [*([2] if has_depths else []), 3, *([4] if has_stops else [])]
    fitted = dict(zip(columns, np.linalg.lstsq(rows[:, columns], wanted, rcond=None)[0], strict=True))
    slope = fitted[3]
    return (
        float(per_step),
        float(fitted.get(2, 0.0)),
        float(slope),
        float(np.clip(fitted.get(4, slope), 0, max(slope, 0))),
    )


def _tables(
    fitted: tuple[float, float, float, float], k_max: int, is_lookup: bool
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Target [1, k_max+1], draft [1, k_max+1] and overhead [k_max+1] seconds.

    A plain step counts as the target's, what speculation adds as the draft's where it is paid for what is asked, and as
    the target's where it is paid for what is found. What a drafted token adds to a draft pass alone is its row.
    """
    plain, base, slope, each_pass = fitted
    k = np.arange(k_max + 1)
    asked = 0.0 if is_lookup else np.where(k > 0, base + each_pass * k, 0.0)
    added = np.where(k > 0, base + slope * k, 0.0) - asked
    return (plain + added)[None], (np.zeros(k_max + 1) + asked)[None], np.zeros(k_max + 1)
