"""The sweep over k at one batch size: a trace and step costs predict every k, and the few best are measured.

It is no second harness: what is measured is a `Bench` whose arms differ in k, plain decoding among them. Predicted and
measured figures are the same statistic, the median prompt's decode speed-up, so that they can stand side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec_cli.engine.arms import Arm, EngineArm
from specdec_cli.measure.bench.bench import Bench, Plan, Progress
from specdec_cli.measure.bench.in_turn import InTurn
from specdec_cli.measure.bench.passes import Differences, Track, against
from specdec_cli.measure.bench.recommend import Case
from specdec_cli.measure.bench.verdict import StepSplit, costs_of
from specdec_cli.measure.machine.load import Conditions, Load, look_at_load
from specdec_cli.measure.predict.cost import Costs
from specdec_cli.measure.predict.evidence import INDIFFERENT, TRUSTED, Evidence, Recommendation
from specdec_cli.measure.predict.predict import Predicted, Prediction
from specdec_cli.measure.predict.profiling import MIN_REPEATS, Watch, profile
from specdec_cli.measure.stats import FloatArray, Interval, paired

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.measure.bench.journal import Journal
    from specdec_cli.measure.predict.traced import Traced
    from specdec_cli.measure.workload.workload import Workload

ArmOf = Callable[[str, int], Arm]
"""An arm of a name and a k."""

MAX_CANDIDATES = 2
PROFILE_SECONDS = 15.0
_BEFOREHAND = MIN_REPEATS, 8  # rounds of the profile that chooses; as many again stand between the passes
_MIN_GROUPS = 8


def arms_of(engine: Engine) -> ArmOf:
    """Our engine at every k."""
    return lambda name, k: EngineArm(name, engine, k)


def profile_workload(
    engine: Engine,
    workload: Workload,
    k_max: int,
    batch_size: int,
    seconds: float = PROFILE_SECONDS,
    watch: Watch | None = None,
    *,
    repeats: tuple[int, int] = _BEFOREHAND,
    first: int = 0,
    is_warm: bool = False,
    overhead_seconds: FloatArray | None = None,
) -> Costs:
    """Costs at the workload's own context lengths, texts and sampling parameters; the rest as for `profile`."""
    sizes = [len(request.token_ids) for request in workload.requests]
    ends = [len(request.token_ids) + request.params.max_new_tokens for request in workload.requests]
    low, high = min(sizes), int(np.median(ends))
    return profile(
        engine,
        k_max,
        (low, (low + high) // 2, max(low, high)),
        text=[token for request in workload.requests for token in request.token_ids],
        params=workload.requests[0].params,
        time_limit_seconds=seconds,
        batch_size=batch_size,
        watch=watch,
        repeats=repeats,
        first=first,
        is_warm=is_warm,
        overhead_seconds=overhead_seconds,
    )


def profile_in_turn(
    engine: Engine, workload: Workload, traced: Traced, k_max: int, batch_size: int, journal: Journal | None = None
) -> InTurn:
    """Profiles between a sweep's passes; those that the journal of an earlier run holds are not taken again."""

    def measure(name: str, first: int, num_rounds: int, overhead_seconds: FloatArray | None) -> Costs:
        def take() -> Costs:
            return profile_workload(
                engine,
                workload,
                k_max,
                batch_size,
                repeats=(1, num_rounds),
                first=first,
                is_warm=True,
                overhead_seconds=overhead_seconds,
            )

        return take() if journal is None else journal.costs(f"draft, {batch_size} together, {name}", take)

    return InTurn(measure, lambda costs: traced.predict(k_max, costs))


def candidates(rows: Sequence[Predicted]) -> list[int]:
    """The few k to measure, the best predicted one first: intervals overlap its own, and no k is clearly slower.

    Prompt by prompt the draws of two k go together, so a pair of them can differ where their intervals overlap.
    """
    known = [row for row in rows if np.isfinite(row.speedup.median)]
    if not known:
        return []
    ordered = sorted(known, key=lambda row: (-row.speedup.median, row.k))
    best = ordered[0]
    near = [row for row in ordered if row.speedup.overlaps(best.speedup) and not _is_clearly_slower(row, best)]
    return [row.k for row in near[:MAX_CANDIDATES]]


def _is_looked_at(num_groups: int) -> bool:
    """Whether measuring may end here: after _MIN_GROUPS, then after twice as many each time."""
    times, rest = divmod(num_groups, _MIN_GROUPS)
    return not rest and times > 0 and times.bit_count() == 1


def _is_clearly_slower(row: Predicted, best: Predicted) -> bool:
    return paired(best.speedup_by_prompt, row.speedup_by_prompt).ratio.is_above(TRUSTED)


@dataclass(frozen=True, slots=True)
class Measured:
    """One k, measured.

    Args:
        k: most tokens drafted in a step.
        speedup: of decoding, over the same engine without a draft.
        track: its passes and counts.
    """

    k: int
    speedup: Interval
    track: Track

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        counts = self.track.counts()
        return {
            "speedup": self.speedup.median,
            "ci95": None if self.speedup.ci95 is None else list(self.speedup.ci95),
            "pairs": self.speedup.pairs,
            "acceptance_length": counts.acceptance_length,
            "acceptance_rate": counts.acceptance_rate,
            "per_position_acceptance_rates": counts.per_position_acceptance_rates,
        }


@dataclass(slots=True)
class Sweep:
    """A sweep, before, while and after its candidates are measured.

    Args:
        arm_of: our engine at a k, under a name; arms take turns on one engine.
        workload: what is decoded.
        costs: of the pair.
        prediction: of every k, as `Traced.predict` makes it; None where no trace can know.
        k_max: largest k.
        is_exhaustive: whether every k is measured.
        batch_size: requests decoded together.
        repeats: how often every k decodes every group, at most.
        journal: of the run, or None.
        load: of the machine, before.
        k_in_use: the recipe's own k at this batch size, which stays where the sweep is inconclusive.
        in_turn: measures step costs between the passes, from which `costs` and `prediction` are updated at the end.
        settled_after: groups (repeats counted) after which more would not have changed the choice; None if all ran.
    """

    arm_of: ArmOf
    workload: Workload
    costs: Costs
    prediction: Prediction | None
    k_max: int
    is_exhaustive: bool = False
    batch_size: int = 1
    repeats: int = 1
    journal: Journal | None = None
    load: Load = field(default_factory=look_at_load)
    k_in_use: int = 0
    in_turn: InTurn | None = None
    ks: list[int] = field(init=False)
    bench: Bench | None = field(init=False, default=None)
    settled_after: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Choose what is measured."""
        assert self.is_exhaustive or self.prediction is not None, "without a prediction every k is measured"
        self.ks = list(range(1, self.k_max + 1))
        if not self.is_exhaustive and self.prediction is not None:
            self.ks = candidates(self.prediction.rows)
        if self.ks:
            plain, first, *rest = (self.arm_of(self._name(k), k) for k in (0, *self.ks))
            plan = Plan(self.batch_size, self.repeats)
            self.bench = Bench(self.workload, plan, first, plain, rest, journal=self.journal)

    def run(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[Progress]:
        """Measure, as `Bench.run`; nothing where no k is worth it.

        Unless every k was asked for, it ends as soon as the best candidate is surely no worse than INDIFFERENT.
        """
        if self.bench is None:
            return
        num_arms, names = 1 + len(self.ks), {self._name(k) for k in (0, *self.ks)}
        for at in self.bench.run(lambda: stopped() or self.settled_after is not None):
            if at.arm in names and at.done % num_arms == 0:
                if at.done and self.settled_after is None and self._is_settled():
                    self.settled_after = at.done // num_arms
                if self.in_turn is not None and self.settled_after is None and not stopped():
                    self.in_turn.before(at.done // num_arms, at.total // num_arms)
            yield at
        if self.in_turn is not None:
            if self.bench.plain.passes and not stopped():
                self.in_turn.after()
            self.costs = self.in_turn.costs(self.costs)
            self.prediction = self.in_turn.predict(self.costs)

    def _is_settled(self) -> bool:
        """Whether more passes would not change the choice: the leader and whether it pays are both known.

        Asked seldom: who looks at an interval often enough finds one that leaves out what is true.
        """
        if self.is_exhaustive or self.bench is None or not _is_looked_at(len(self.bench.plain.passes)):
            return False
        if self.conditions.busy is not None:
            return False
        measured = self.measured()
        if not measured:
            return False
        leader = max(measured.values(), key=lambda one: (one.speedup.median, -one.k))
        if not (leader.speedup.is_above(1.0) or leader.speedup.is_below(1.0)):
            return False
        others = [one.track for one in measured.values() if one is not leader]
        found = [against(leader.track, track) for track in others]
        return all(one is not None and one.ratio.is_above(1 - INDIFFERENT) for one in found)

    def measured(self) -> dict[int, Measured]:
        """The measurements so far, by k."""
        if self.bench is None:
            return {}
        found = {}
        for k in sorted(self.ks):
            track = self._track(k)
            one = against(track, self.bench.plain)
            if one is not None:
                found[k] = Measured(k, one.ratio, track)
        return found

    def differences(self) -> Differences:
        """Every output with a draft, of every k, against the same request's without."""
        if self.bench is None:
            return Differences()
        return Differences.between([self._track(k) for k in self.ks], self.bench.plain)

    def recommended(self) -> Recommendation:
        """The k to run with, and how sure that is."""
        by_k = {k: self._evidence(one) for k, one in self.measured().items()}
        busy = self.conditions.busy
        return Case(by_k, self.prediction, busy, self.k_in_use, self.batch_size, self._costs).recommend()

    @property
    def conditions(self) -> Conditions:
        """How busy the machine was."""
        return Conditions.of(self.load, [] if self.bench is None else self.bench.passes)

    def _evidence(self, one: Measured) -> Evidence:
        """The evidence for a measured k. Predictions for a batch are less certain than their intervals."""
        predicted = None if self.prediction is None else self.prediction.rows[one.k - 1].speedup
        return Evidence(one.speedup, predicted, TRUSTED if self.batch_size == 1 else math.inf)

    def _costs(self, k: int) -> StepSplit | None:
        assert self.bench is not None, "only a measured k has costs"
        return costs_of(self._track(k), self.bench.plain)

    def _name(self, k: int) -> str:
        """An arm's, unlike every other batch size's: one journal holds them all."""
        together = "" if self.batch_size == 1 else f", {self.batch_size} together"
        return f"{f'k = {k}' if k else 'without a draft'}{together}"

    def _track(self, k: int) -> Track:
        """The result of a measured k."""
        assert self.bench is not None, "only a measured k has a track"
        return self.bench.draft if k == self.ks[0] else self.bench.against[self._name(k)]
