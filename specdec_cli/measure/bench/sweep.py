"""The sweep over k and trees at one batch size: a trace and step costs predict all, and the few best are measured.

It is no second harness: what is measured is a `Bench` whose arms differ in shape, plain decoding among them. Predicted
and measured figures are the same statistic, the median prompt's decode speed-up, so that they can stand side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec_cli.engine.arms import Arm, EngineArm
from specdec_cli.measure.bench.bench import Bench, Plan, Progress
from specdec_cli.measure.bench.candidates import candidates
from specdec_cli.measure.bench.in_turn import InTurn
from specdec_cli.measure.bench.passes import Differences, Track, against
from specdec_cli.measure.bench.recommend import Case
from specdec_cli.measure.bench.verdict import StepSplit, costs_of
from specdec_cli.measure.machine.load import Conditions, Load, look_at_load
from specdec_cli.measure.predict.cost import Costs
from specdec_cli.measure.predict.draft_shape import PLAIN, DraftShape
from specdec_cli.measure.predict.evidence import INDIFFERENT, TRUSTED, Evidence, Recommendation, largest_words
from specdec_cli.measure.predict.predict import Predicted, Prediction
from specdec_cli.measure.predict.profiling import MIN_REPEATS, Watch, profile
from specdec_cli.measure.stats import FloatArray, Interval
from specdec_cli.tree_shape import TreeShape

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.measure.bench.journal import Journal
    from specdec_cli.measure.predict.traced import Traced
    from specdec_cli.measure.workload.workload import Workload

ArmOf = Callable[[str, DraftShape], Arm]
"""An arm of a name and the shape of its drafts."""

MAX_TREES = 3  # that are chosen
PROFILE_SECONDS = 15.0
_BEFOREHAND = MIN_REPEATS, 8  # rounds of the profile that chooses; as many again stand between the passes
_MIN_GROUPS = 8


def arms_of(engine: Engine) -> ArmOf:
    """Our engine with every shape."""
    return lambda name, shape: EngineArm(name, engine, shape.k, shape.asked_tree)


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
    trees: Sequence[TreeShape] = (),
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
        trees=trees,
    )


def profile_in_turn(
    engine: Engine,
    workload: Workload,
    traced: Traced,
    k_max: int,
    batch_size: int,
    journal: Journal | None = None,
    *,
    profiled: Sequence[TreeShape] = (),
    trees: Sequence[TreeShape] = (),
) -> InTurn:
    """Profiles between a sweep's passes; those that the journal of an earlier run holds are not taken again.

    Args:
        engine: idle.
        workload: what is decoded.
        traced: the evidence for predictions.
        k_max: largest k.
        batch_size: requests decoded together.
        journal: of the run, or None.
        profiled: trees that are profiled.
        trees: those that are predicted.
    """

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
                trees=profiled,
            )

        return take() if journal is None else journal.costs(f"draft, {batch_size} together, {name}", take)

    return InTurn(measure, lambda costs: traced.predict(k_max, costs, trees))


def _is_looked_at(num_groups: int) -> bool:
    """Whether measuring may end here: after _MIN_GROUPS, then after twice as many each time."""
    times, rest = divmod(num_groups, _MIN_GROUPS)
    return not rest and times > 0 and times.bit_count() == 1


@dataclass(frozen=True, slots=True)
class Measured:
    """One k or tree, measured.

    Args:
        shape: what a step drafts.
        speedup: of decoding, over the same engine without a draft.
        track: its passes and counts.
    """

    shape: DraftShape
    speedup: Interval
    track: Track

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of decoding, of all its passes together."""
        return self.track.timing().decode_tokens_per_second

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        counts = self.track.counts()
        return {
            "speedup": self.speedup.median,
            "tokens_per_second": self.tokens_per_second,
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
        arm_of: our engine with a shape, under a name; arms take turns on one engine.
        workload: what is decoded.
        costs: of the pair.
        prediction: of every k and tree, as `Traced.predict` makes it; None where no trace can know.
        k_max: largest k.
        is_exhaustive: whether every k and predicted tree is measured.
        batch_size: requests decoded together.
        repeats: how often every arm decodes every group, at most.
        journal: of the run, or None.
        load: of the machine, before.
        in_use: the recipe's own k or tree at this batch size, which stays where the sweep is inconclusive.
        in_turn: measures step costs between the passes, from which `costs` and `prediction` are updated at the end.
        most_depth: the largest k that the draft can reach; None without a limit.
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
    in_use: DraftShape = PLAIN
    in_turn: InTurn | None = None
    most_depth: int | None = None
    shapes: list[DraftShape] = field(init=False)
    bench: Bench | None = field(init=False, default=None)
    settled_after: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Choose what is measured."""
        assert self.is_exhaustive or self.prediction is not None, "without a prediction every k is measured"
        self.shapes = self.every_shape()
        if not self.is_exhaustive and self.prediction is not None:
            self.shapes = candidates(self.prediction.rows)
        if self.shapes:
            plain, first, *rest = (self.arm_of(self._name(one), one) for one in (PLAIN, *self.shapes))
            plan = Plan(self.batch_size, self.repeats)
            self.bench = Bench(self.workload, plan, first, plain, rest, journal=self.journal)

    def every_shape(self) -> list[DraftShape]:
        """Every k, and the predicted trees."""
        trees = [] if self.prediction is None else self.prediction.trees
        return [*map(DraftShape, range(1, self.k_max + 1)), *(row.shape for row in trees)]

    def run(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[Progress]:
        """Measure, as `Bench.run`; nothing where no shape is worth it.

        Unless every one was asked for, it ends as soon as the best candidate is surely no worse than INDIFFERENT.
        """
        if self.bench is None:
            return
        num_arms, names = 1 + len(self.shapes), {self._name(one) for one in (PLAIN, *self.shapes)}
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
        leader = max(measured.values(), key=lambda one: one.speedup.median)
        if not (leader.speedup.is_above(1.0) or leader.speedup.is_below(1.0)):
            return False
        others = [one.track for one in measured.values() if one is not leader]
        found = [against(leader.track, track) for track in others]
        return all(one is not None and one.ratio.is_above(1 - INDIFFERENT) for one in found)

    def predicted(self, shape: DraftShape) -> Predicted | None:
        """The prediction of a shape; None where there is none."""
        return None if self.prediction is None else self.prediction.row(shape)

    def measured(self) -> dict[DraftShape, Measured]:
        """The measurements so far, the smallest shape first."""
        if self.bench is None:
            return {}
        found = {}
        for shape in sorted(self.shapes):
            track = self._track(shape)
            one = against(track, self.bench.plain)
            if one is not None:
                found[shape] = Measured(shape, one.ratio, track)
        return found

    def differences(self) -> Differences:
        """Every output with a draft, of every shape, against the same request's without."""
        if self.bench is None:
            return Differences()
        return Differences.between([self._track(one) for one in self.shapes], self.bench.plain)

    def recommended(self) -> Recommendation:
        """The k or tree to run with, and how sure that is."""
        by_shape = {shape: self._evidence(one) for shape, one in self.measured().items()}
        busy = self.conditions.busy
        found = Case(by_shape, self.prediction, busy, self.in_use, self.batch_size, self._costs).recommend()
        is_last = found.verdict == "speculate" and found.tree is None and found.k == self.k_max
        return replace(found, why=f"{found.why}; {largest_words(self.k_max, self.most_depth)}") if is_last else found

    @property
    def conditions(self) -> Conditions:
        """How busy the machine was."""
        return Conditions.of(self.load, [] if self.bench is None else self.bench.passes)

    def _evidence(self, one: Measured) -> Evidence:
        """The evidence for a measured shape. Predictions for a batch are less certain than their intervals."""
        row = self.predicted(one.shape)
        return Evidence(
            one.speedup, None if row is None else row.speedup, TRUSTED if self.batch_size == 1 else math.inf
        )

    def _costs(self, shape: DraftShape) -> StepSplit | None:
        assert self.bench is not None, "only a measured shape has costs"
        return costs_of(self._track(shape), self.bench.plain)

    def _name(self, shape: DraftShape) -> str:
        """An arm's, unlike every other batch size's: one journal holds them all."""
        together = "" if self.batch_size == 1 else f", {self.batch_size} together"
        return f"{shape if shape.k else 'without a draft'}{together}"

    def _track(self, shape: DraftShape) -> Track:
        """The result of a measured shape."""
        assert self.bench is not None, "only a measured shape has a track"
        return self.bench.draft if shape == self.shapes[0] else self.bench.against[self._name(shape)]
