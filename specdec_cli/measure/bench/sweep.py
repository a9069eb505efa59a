"""The sweep over k and trees at one batch size: a trace and step costs predict all, and the few best are measured.

It is no second harness: what is measured is a `Bench` whose arms differ in shape, plain decoding among them. Predicted
and measured figures are the same statistic, the median prompt's decode speed-up, so that they can stand side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from specdec_cli.draft_shape import PLAIN, DraftShape
from specdec_cli.engine.arms import EngineArm
from specdec_cli.measure.bench.bench import Bench, Progress
from specdec_cli.measure.bench.in_turn import InTurn
from specdec_cli.measure.bench.passes import Compared, Pass, Track, against, compared_outputs
from specdec_cli.measure.bench.step_split import StepSplit, costs_of
from specdec_cli.measure.bench.study import Measured, SizeStudy, Study
from specdec_cli.measure.predict.cost import Costs
from specdec_cli.measure.predict.evidence import INDIFFERENT, TRUSTED
from specdec_cli.measure.predict.predict import Predicted
from specdec_cli.measure.predict.profiling import MIN_REPEATS, Watch, profile
from specdec_cli.measure.stats import FloatArray, paired
from specdec_cli.tree_shape import TreeShape

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.measure.bench.journal import Journal
    from specdec_cli.measure.predict.traced import Traced
    from specdec_cli.measure.workload.workload import Workload

MAX_CANDIDATES = 2
MAX_TREES = 3  # that are chosen
PROFILE_SECONDS = 15.0
_BEFOREHAND = MIN_REPEATS, 8  # rounds of the profile that chooses; as many again stand between the passes
_MIN_GROUPS = 8


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
    journal: Journal | None = None,
    name: str = "",
) -> Costs:
    """Costs at the workload's own context lengths, texts and sampling parameters; the rest as for `profile`.

    Those that the journal of an earlier run holds under the name are not measured again.
    """
    sizes = [len(request.token_ids) for request in workload.requests]
    ends = [len(request.token_ids) + request.params.max_new_tokens for request in workload.requests]
    low, high = min(sizes), int(np.median(ends))
    measure = partial(
        profile,
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
    return measure() if journal is None else journal.costs(name, measure)


def candidates(rows: Sequence[Predicted]) -> list[DraftShape]:
    """The few shapes to measure, the best predicted one first: intervals overlap its own, and none is clearly slower.

    Prompt by prompt the draws of two shapes go together, so a pair of them can differ where their intervals overlap.
    Where there are chains and trees, the best of each is among them.
    """
    known = [row for row in rows if np.isfinite(row.speedup.median)]
    if not known:
        return []
    ordered = sorted(known, key=lambda row: (-row.speedup.median, row.shape))
    best = ordered[0]
    near = [row for row in ordered if row.speedup.overlaps(best.speedup) and not _is_clearly_slower(row, best)]
    chains, trees = ([row for row in ordered if (row.shape.tree is None) is is_chain] for is_chain in (True, False))
    return list(dict.fromkeys(row.shape for row in [*near[:MAX_CANDIDATES], *chains[:1], *trees[:1]]))


def _is_clearly_slower(row: Predicted, best: Predicted) -> bool:
    return paired(best.speedup_by_prompt, row.speedup_by_prompt).ratio.is_above(TRUSTED)


def _is_looked_at(num_groups: int) -> bool:
    """Whether measuring may end here: after _MIN_GROUPS, then after twice as many each time."""
    times, rest = divmod(num_groups, _MIN_GROUPS)
    return not rest and times > 0 and times.bit_count() == 1


@dataclass(slots=True, kw_only=True)
class Sweep(SizeStudy):
    """A sweep of our engine at one batch size, before, while and after its candidates are measured.

    Args:
        engine: ours, idle; arms take turns on it.
        workload: what is decoded.
        is_exhaustive: whether every k and predicted tree is measured.
        repeats: how often every arm decodes every group, at most.
        journal: of the run, or None.

    Attributes:
        shapes: the measured ones.
        bench: measures them; None where no shape is worth it.
        in_turn: measures step costs between the passes, from which `costs` and `prediction` are updated at the end.
    """

    engine: Engine
    workload: Workload
    is_exhaustive: bool = False
    repeats: int = 1
    journal: Journal | None = None
    in_turn: InTurn | None = field(init=False, default=None)
    shapes: list[DraftShape] = field(init=False)
    bench: Bench | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Choose what is measured."""
        assert self.is_exhaustive or self.prediction is not None, "without a prediction every k is measured"
        self.most_depth = self.engine.drafter.most_depth
        if self.batch_size > 1:  # predictions for a batch are less certain than their intervals
            self.trusted = math.inf
        self.shapes = self.every_shape()
        if not self.is_exhaustive and self.prediction is not None:
            self.shapes = candidates(self.prediction.rows)
        if self.shapes:
            plain, first, *rest = (
                EngineArm(self._name(shape), self.engine, shape.k, shape.asked_tree) for shape in (PLAIN, *self.shapes)
            )
            pace = self.batch_size, self.repeats
            self.bench = Bench(self.workload, first, plain, rest, *pace, journal=self.journal)

    def profile_in_turn(self, traced: Traced, trees: Sequence[TreeShape] = ()) -> None:
        """Profile between the passes, too."""
        measured = [shape.tree for shape in self.shapes if shape.tree is not None]
        profiled = tuple(dict.fromkeys([*self.costs.trees, *measured]))

        def measure(name: str, first: int, num_rounds: int, overhead_seconds: FloatArray | None) -> Costs:
            return profile_workload(
                self.engine,
                self.workload,
                self.k_max,
                self.batch_size,
                repeats=(1, num_rounds),
                first=first,
                is_warm=True,
                overhead_seconds=overhead_seconds,
                trees=profiled,
                journal=self.journal,
                name=f"draft, {self.batch_size} together, {name}",
            )

        self.in_turn = InTurn(measure, lambda costs: traced.predict(self.k_max, costs, trees))

    def run(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[Progress]:
        """Measure, as `Bench.run`; nothing where no shape is worth it.

        Unless every one was asked for, it ends as soon as the best candidate is surely no worse than INDIFFERENT.
        """
        if self.bench is None:
            return
        num_arms, names = 1 + len(self.shapes), {self._name(shape) for shape in (PLAIN, *self.shapes)}
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

        Checked rarely: repeated looks inflate false positives.
        """
        if self.is_exhaustive or self.bench is None or not _is_looked_at(len(self.bench.plain.passes)):
            return False
        if self.conditions.busy is not None:
            return False
        measured = self.measured()
        if not measured:
            return False
        leader = max(measured.values(), key=lambda each: each.speedup.median)
        if not (leader.speedup.is_above(1.0) or leader.speedup.is_below(1.0)):
            return False
        others = [shape for shape in measured if shape != leader.shape]
        pairs = [against(self.track(leader.shape), self.track(shape)) for shape in others]
        return all(pair is not None and pair.ratio.is_above(1 - INDIFFERENT) for pair in pairs)

    def measured(self) -> dict[DraftShape, Measured]:
        """The measurements so far, the smallest shape first."""
        if self.bench is None:
            return {}
        tracks = {shape: self.track(shape) for shape in sorted(self.shapes)}
        return {
            shape: Measured(shape, pair.ratio, track.timing().decode_tokens_per_second, track.counts())
            for shape, track in tracks.items()
            if (pair := against(track, self.bench.plain)) is not None
        }

    def passes(self) -> Sequence[Pass]:
        """Counted passes of all arms."""
        return () if self.bench is None else self.bench.passes

    def compared_outputs(self) -> Iterable[Compared]:
        """Every output with a draft, of every shape, beside the same request's without."""
        tracks = () if self.bench is None else [self.track(shape) for shape in self.shapes]
        return () if self.bench is None else compared_outputs(tracks, self.bench.plain)

    def notices(self) -> list[str]:
        """The notes of the profile and of the passes."""
        warning = None if self.prediction is None else self.costs.warning
        return [*([warning] if warning else []), *([] if self.bench is None else self.bench.notices)]

    def step_split(self, shape: DraftShape) -> StepSplit | None:
        """Parts of the time of a measured shape's steps; None where that is not known."""
        assert self.bench is not None, "only a measured shape has costs"
        return costs_of(self.track(shape), self.bench.plain)

    def track(self, shape: DraftShape) -> Track:
        """The passes of a measured shape."""
        assert self.bench is not None, "only a measured shape has a track"
        return self.bench.draft if shape == self.shapes[0] else self.bench.against[self._name(shape)]

    def _name(self, shape: DraftShape) -> str:
        """An arm's name, which no arm of another batch size has: one journal holds them all."""
        together = "" if self.batch_size == 1 else f", {self.batch_size} together"
        return f"{shape if shape.k else 'without a draft'}{together}"


@dataclass(slots=True)
class Sweeps(Study):
    """Sweeps of our engine at several batch sizes.

    Args:
        by_size: ascending.
        traced: what the predictions rest on; None where no trace can tell.
    """

    by_size: Sequence[Sweep]

    def run(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[tuple[Sweep, Progress]]:
        """Measure one batch size after another, as `Sweep.run`."""
        for sweep in self.by_size:
            for at in sweep.run(stopped):
                yield sweep, at
