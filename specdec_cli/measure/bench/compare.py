"""Drafts against each other: one target and one text, each draft at its own best k, and every pair compared.

A trace predicts every k of every draft; then each is measured at the k predicted best (or at every k), all taking
turns with each other and with the same plain arm. Pairs are groups of prompts that both decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from specdec_cli.engine.arms import EngineArm
from specdec_cli.errors import UsageError
from specdec_cli.measure.bench.bench import Bench, Plan, Progress
from specdec_cli.measure.bench.passes import Differences, Kind, Track, against, speeds
from specdec_cli.measure.machine.load import Load, look_at_load
from specdec_cli.measure.predict.cost import Costs
from specdec_cli.measure.predict.predict import Predicted, Prediction, predict
from specdec_cli.measure.predict.profiling import profile
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.tracing import Tell, Watch, in_phase, trace_draft, trace_target, untold
from specdec_cli.measure.stats import Interval, Paired
from specdec_cli.measure.workload.workload import Workload

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.measure.bench.journal import Journal
    from specdec_cli.measure.predict.trace import Trace

NO_DRAFT = "none"
_PROFILE_SECONDS = 15.0  # of all drafts together, at least the next for each
_MIN_PROFILE_SECONDS = 4.0


@dataclass(slots=True, eq=False)
class Contender:
    """One draft.

    Args:
        draft: its name in reports.
        method: how it drafts.
        engine: the shared target with this draft.
        costs: of its steps; None before they are measured, and where it never drafts.
        prediction: None where the trace does not tell.
        tracks: what was measured, by k.
    """

    draft: str
    method: str
    engine: Engine
    costs: Costs | None = None
    prediction: Prediction | None = None
    tracks: dict[int, Track] = field(default_factory=dict)

    @property
    def drafts(self) -> bool:
        """Whether it is a draft at all."""
        return self.method != NO_DRAFT

    def arm(self, k: int) -> EngineArm:
        """The engine with this draft at a k."""
        return EngineArm(f"{self.draft} k={k}", self.engine, k)

    def predicted_best(self) -> Predicted | None:
        """The k of the largest predicted speed-up, the smaller of equals, be it worth while or not."""
        rows = [] if self.prediction is None else self.prediction.rows
        return max(rows, key=lambda row: (np.nan_to_num(row.median_speedup.median), -row.k), default=None)

    @property
    def cost_ratio(self) -> float | None:
        """Seconds of a drafted token over those of a plain step."""
        if not self.drafts:
            return 0.0
        if self.prediction is not None:
            return self.prediction.cost_ratio
        if self.costs is None:
            return None
        context = self.costs.middle_context
        return self.costs.draft_seconds_per_token(context) / float(self.costs.plain(context))

    def sizes(self) -> tuple[int | None, int | None]:
        """Parameters and bytes (weights and KV cache) of what drafts; 0 without any, None where they are not known."""
        return self.engine.drafter.sizes


@dataclass(frozen=True, slots=True)
class Pair:
    """Two drafts at their own best k, a before b in the ranking."""

    a: Contender
    b: Contender
    found: Paired


@dataclass(slots=True, eq=False)
class DraftComparison:
    """A comparison, before, while and after it runs.

    Args:
        contenders: drafts around one target.
        workload: what is decoded.
        k_max: largest k.
        batch_size: requests of one task that are decoded together.
        repeats: how often every arm decodes every group.
        is_exhaustive: whether every k is measured.
        verify: the rule of verification.
        trace: the target's text; made where it is not given.
        notices: for the reader of the report.
        journal: of the run, or None.
        load: of the machine, before.
    """

    contenders: Sequence[Contender]
    workload: Workload
    k_max: int
    batch_size: int = 1
    repeats: int = 2
    is_exhaustive: bool = False
    verify: str = "auto"
    trace: Trace | None = None
    notices: list[str] = field(default_factory=list)
    journal: Journal | None = None
    load: Load = field(default_factory=look_at_load)
    _bench: Bench | None = None

    def study(self, is_predictable: bool = True, tell: Tell = untold) -> None:
        """Trace the target once, every draft along it, and price their steps.

        Args:
            is_predictable: whether a trace knows this verification at all.
            tell: told what is being done, and how far it is.

        Raises:
            UsageError: a draft whose acceptance no trace tells, unless every k is measured.
        """
        rivals = [contender for contender in self.contenders if contender.drafts]
        if self.trace is not None:
            self.trace.check_target(rivals[0].engine.target.origin)
            self.notices += self.trace.notices
        if self.trace is None and is_predictable:
            watch = in_phase(tell, "tracing the target")
            self.trace = trace_target(rivals[0].engine, self.workload.requests, watch)
        seconds = max(_PROFILE_SECONDS / len(rivals), _MIN_PROFILE_SECONDS)
        for contender in rivals:
            share = in_phase(tell, f"measuring the cost of a step with {contender.draft} costs")
            contender.costs = self._costs(contender, seconds, share)
            if self.trace is not None and is_predictable:
                self._predict(contender, contender.costs, self.trace, in_phase(tell, f"tracing {contender.draft}"))

    def _costs(self, contender: Contender, seconds: float, watch: Callable[[float], None]) -> Costs:
        if self.journal is None:
            return self._profile(contender, seconds, watch)
        return self.journal.costs(contender.draft, lambda: self._profile(contender, seconds, watch))

    def _profile(self, contender: Contender, seconds: float, watch: Callable[[float], None]) -> Costs:
        requests = self.workload.requests
        lengths = [len(request.token_ids) for request in requests]
        ends = [len(request.token_ids) + request.params.max_new_tokens for request in requests]
        return profile(
            contender.engine,
            self.k_max,
            sorted({int(np.median(lengths)), int(np.median([*lengths, *ends])), int(np.median(ends))}),
            text=self._text(),
            params=requests[0].params,
            time_limit_seconds=seconds,
            batch_size=self.batch_size,
            watch=watch,
        )

    def _text(self) -> list[int]:
        """A text of the workload's own, so that a draft finds in it what it will find."""
        if self.trace is not None:
            longest = max(self.trace.prompts, key=lambda prompt: len(prompt.output))
            return [*longest.token_ids, *longest.output]
        return max((request.token_ids for request in self.workload.requests), key=len)

    def _predict(self, contender: Contender, costs: Costs, trace: Trace, watch: Watch) -> None:
        try:
            trace.drafts[contender.draft] = trace_draft(
                trace, contender.engine.drafter, self.k_max, watch, contender.engine.target
            )
        except UsageError as error:
            if not self.is_exhaustive:
                raise
            self.notices.append(f"{error.message}: it is measured, not predicted")
            return
        contender.prediction = predict(replay(trace, contender.draft, self.verify, self.k_max), costs)

    def run(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[Progress]:
        """Measure: every draft at its own best k, or at every k, and one plain arm, taking turns.

        Args:
            stopped: asked between steps and passes; what is whole by then is kept.
        """
        arms = [
            (contender, k, contender.arm(k))
            for contender in self.contenders
            if contender.drafts
            for k in self._depths(contender)
        ]
        (first, _, draft_arm), others = arms[0], [arm for *_, arm in arms[1:]]
        plain_arm = EngineArm("without a draft", first.engine, 0)
        plan = Plan(self.batch_size, self.repeats)
        self._bench = bench = Bench(
            self.workload, plan, draft_arm, plain_arm, others, notices=self.notices, journal=self.journal
        )
        for contender, k, arm in arms:
            contender.tracks[k] = bench.against.get(arm.name, bench.draft)
        for contender in self.contenders:
            if not contender.drafts:
                contender.tracks[0] = bench.plain
        yield from bench.run(stopped)

    def _depths(self, contender: Contender) -> list[int]:
        options = contender.engine.options
        shape = options.shape_of(options.tree)
        if shape is not None and not self.is_exhaustive:  # a trace predicts chains alone
            return [min(self.k_max, shape.depth)]
        best = contender.predicted_best()
        if self.is_exhaustive or best is None:
            return list(range(1, self.k_max + 1))
        return [best.k]

    @property
    def bench(self) -> Bench:
        """The benchmark that measures."""
        assert self._bench is not None, "asked for after the measurement began"
        return self._bench

    @property
    def plain(self) -> Track:
        """The arm without a draft."""
        return self.bench.plain

    @property
    def is_measured(self) -> bool:
        """Whether a draft and the plain arm decoded, be it no more than a first token each."""
        tracks = [track for one in self.contenders if one.drafts for track in one.tracks.values()]
        return bool(self.plain.passes) and any(track.passes for track in tracks)

    @property
    def num_passes(self) -> int:
        """Whole passes of all arms."""
        return len(self.bench.passes)

    def speedup(self, contender: Contender, kind: Kind = "decode", task: str | None = None) -> Interval | None:
        """How much faster a draft is at its best k than no draft."""
        found = against(contender.tracks[self.best_k(contender)], self.plain, kind, task)
        return None if found is None else found.ratio

    def speedup_at(self, contender: Contender, k: int) -> Interval | None:
        """The same at any measured k."""
        found = against(contender.tracks[k], self.plain)
        return None if found is None else found.ratio

    def best_k(self, contender: Contender) -> int:
        """The measured k of the largest speed-up, the smaller of equals."""
        by_k = {k: speeds(track, self.plain, "decode") for k, track in contender.tracks.items()}
        return max(by_k, key=lambda k: (-1.0 if (s := by_k[k]) is None else float(np.median(s[0] / s[1])), -k))

    def track(self, contender: Contender) -> Track:
        """The result of a draft at its best k."""
        return contender.tracks[self.best_k(contender)]

    def ranking(self) -> list[Contender]:
        """The fastest first; what was not measured comes last."""
        found = {id(one): self.speedup(one) for one in self.contenders}
        return sorted(self.contenders, key=lambda one: -(s.median if (s := found[id(one)]) is not None else 0.0))

    def pairs(self) -> list[Pair]:
        """Every two drafts that were measured."""
        found = [(a, b, against(self.track(a), self.track(b))) for a, b in combinations(self.ranking(), 2)]
        return [Pair(a, b, one) for a, b, one in found if one is not None]

    def outputs(self) -> list[Sequence[int]]:
        """Every output without a draft."""
        return [tokens for one in self.plain.passes for tokens in one.run.token_ids or ()]

    def differences(self) -> Differences:
        """Every output of every draft against the same request's output without one."""
        tracks = [track for one in self.contenders if one.drafts for track in one.tracks.values()]
        return Differences.between(tracks, self.plain)
