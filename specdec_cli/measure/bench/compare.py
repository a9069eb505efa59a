"""Drafts against each other: one target and one text, each draft at its own best k, and every pair compared.

Every draft is measured against the same plain arm. Pairs are groups of prompts that both decoded. Of drafts that are
loaded here a trace predicts every k first, and each is measured at the k predicted best, or at every k; drafts of
another engine are measured at the k that their recipe names.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specdec_cli.document import DifferencesResult, Interval
from specdec_cli.engine.depth.draft_limit import cut_drafts, depths_within
from specdec_cli.errors import UsageError
from specdec_cli.measure.bench.bench import Bench, Progress
from specdec_cli.measure.bench.passes import Kind, Track, against, compared_outputs, differences, speeds, speedup
from specdec_cli.measure.bench.sweep import profile_workload
from specdec_cli.measure.machine.load import Load, look_at_load
from specdec_cli.measure.predict.cost import Costs
from specdec_cli.measure.predict.predict import Predicted, Prediction
from specdec_cli.measure.predict.ranking import RankingResult, ranking_of
from specdec_cli.measure.predict.traced import Traced, target_trace, trace_further
from specdec_cli.measure.predict.tracing import Tell, Watch, in_phase, trace_draft
from specdec_cli.measure.stats import Paired
from specdec_cli.measure.workload.workload import Workload

if TYPE_CHECKING:
    from specdec_cli.engine.arms import Arm
    from specdec_cli.engine.engine import Engine
    from specdec_cli.measure.bench.journal import Journal
    from specdec_cli.measure.predict.trace import Trace
    from specdec_cli.text.shared_vocabulary import SharedVocabulary
    from specdec_cli.tree_shape import TreeShape

NO_DRAFT = "none"
_PROFILE_SECONDS = 15.0  # of all drafts together, at least the next for each
_MIN_PROFILE_SECONDS = 4.0


@dataclass(slots=True, eq=False)
class Contender:
    """One draft.

    Args:
        draft: its name in reports.
        method: how it drafts.
        engine: the shared target with this draft; None where another engine decodes.
        k: at which it is measured; None where that is predicted.
        k_max: largest k that was considered; 0 before that is known.
        costs: of its steps; None before they are measured, and where it never drafts.
        prediction: None where the trace does not tell.
        ranking: what its ranking of tokens could give; None where the trace does not tell.
        tracks: what was measured, by k.
    """

    draft: str
    method: str
    engine: Engine | None = None
    k: int | None = None
    k_max: int = 0
    costs: Costs | None = None
    prediction: Prediction | None = None
    ranking: RankingResult | None = None
    tracks: dict[int, Track] = field(default_factory=dict)

    @property
    def drafts(self) -> bool:
        """Whether it drafts anything."""
        return self.method != NO_DRAFT

    def predicted_best(self) -> Predicted | None:
        """The k of the largest predicted speed-up, the smaller of equals, be it worth while or not."""
        rows = [] if self.prediction is None else self.prediction.rows
        return max(rows, key=lambda row: (np.nan_to_num(row.speedup.median), -row.k), default=None)

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
        if self.engine is not None:
            return self.engine.drafter.sizes
        return (None, None) if self.drafts else (0, 0)

    @property
    def most_depth(self) -> int | None:
        """The largest k that it can reach; None without a limit, and where that is not known."""
        return None if self.engine is None else self.engine.drafter.most_depth

    @property
    def shared_vocabulary(self) -> SharedVocabulary | None:
        """Vocabulary that a draft with another tokenizer shares with the target; None of others."""
        return None if self.engine is None else self.engine.drafter.shared_vocabulary

    @property
    def loaded(self) -> Engine:
        """The engine of a draft that is traced and priced here."""
        assert self.engine is not None, "another engine's draft is measured at its recipe's k"
        return self.engine

    @property
    def tree(self) -> TreeShape | None:
        """Shape of the trees that it drafts; None for chains."""
        return self.loaded.options.shape_of(self.loaded.options.tree)

    def deepest(self, k_max: int) -> int:
        """The largest k up to k_max that the draft can reach."""
        return depths_within(self.loaded.drafter, k_max)[0]

    def limits(self, k_max: int) -> list[str]:
        """Sentences that the draft goes less deep than k_max, or than the tree."""
        drafter, shape = self.loaded.drafter, self.tree
        return depths_within(drafter, k_max)[1] if shape is None else cut_drafts(drafter, k_max, shape)


@dataclass(slots=True, eq=False)
class DraftComparison:
    """A comparison, before, while and after it runs.

    Args:
        contenders: drafts around one target.
        workload: what is decoded.
        k_max: largest k.
        furthest: largest k for a draft that is predicted to be best at the largest one so far.
        batch_size: requests of one task that are decoded together.
        repeats: how often every arm decodes every group.
        is_exhaustive: whether every k is measured.
        notices: for the reader of the report.
        journal: of the run, or None.
        load: of the machine, before.
        verify: the rule of verification.
    """

    contenders: Sequence[Contender]
    workload: Workload
    k_max: int
    furthest: int = 0
    batch_size: int = 1
    repeats: int = 2
    is_exhaustive: bool = False
    notices: list[str] = field(default_factory=list)
    journal: Journal | None = None
    load: Load = field(default_factory=look_at_load)
    verify: str = "auto"
    _bench: Bench | None = None

    def study(self, is_predictable: bool, path: Path | None, tell: Tell) -> None:
        """Trace the target once and every draft along it, and measure the costs of their steps.

        Args:
            is_predictable: whether a trace knows this verification at all.
            path: of the target's trace, read where it exists, else written; drafts are traced again, because they may
                have changed. None for neither.
            tell: called with the current phase and its progress.

        Raises:
            UsageError: a draft whose acceptance no trace tells, unless every k is measured.
        """
        rivals = [contender for contender in self.contenders if contender.drafts]
        for contender in rivals:
            self.notices += [f"{contender.draft}: {message}" for message in contender.limits(self.k_max)]
        trace, is_new = None, False
        if is_predictable:
            trace, is_new = target_trace(rivals[0].loaded, self.workload.requests, path, tell)
            self.notices += trace.notices
        seconds = max(_PROFILE_SECONDS / len(rivals), _MIN_PROFILE_SECONDS)
        for contender in rivals:
            contender.k_max = contender.deepest(self.k_max)
            self._study_draft(contender, trace, seconds, tell)
        if trace is not None and is_new and path is not None:
            trace.save(path)

    def _study_draft(self, contender: Contender, trace: Trace | None, seconds: float, tell: Tell) -> None:
        """Trace a draft, measure its costs and predict every k."""
        watch, traced = in_phase(tell, f"tracing {contender.draft}"), None
        if trace is not None and self._trace_draft(contender, trace, watch):
            traced = Traced(trace, contender.draft, self.verify)
        while True:
            contender.costs = self._costs(contender, seconds, tell)
            if traced is None:
                return
            contender.prediction = traced.predict(contender.k_max, contender.costs)
            if not self._goes_further(contender):
                contender.ranking = ranking_of(traced.trace, contender.draft, contender.k_max)
                return
            trace_further(traced, contender.loaded, contender.k_max, tell)

    def _costs(self, contender: Contender, seconds: float, tell: Tell) -> Costs:
        """Costs of a draft's steps; those of an earlier run that this one continues are read."""
        return profile_workload(
            contender.loaded,
            self.workload,
            contender.k_max,
            self.batch_size,
            seconds,
            in_phase(tell, f"measuring the cost of a step with {contender.draft} costs"),
            journal=self.journal,
            name=f"{contender.draft}{'' if contender.k_max <= self.k_max else f', k up to {contender.k_max}'}",
        )

    def _trace_draft(self, contender: Contender, trace: Trace, watch: Watch) -> bool:
        """Trace a draft along the target's text; False where none can, and every k is measured."""
        engine = contender.loaded
        try:
            trace.drafts[contender.draft] = trace_draft(trace, engine.drafter, contender.k_max, watch, engine.target)
        except UsageError as error:
            if not self.is_exhaustive:
                raise
            self.notices.append(f"{error.message}: it is measured, not predicted")
            return False
        return True

    def _goes_further(self, contender: Contender) -> bool:
        """Consider larger ks if the best one is predicted to be the largest and nothing limits it; whether it does."""
        old, prediction = contender.k_max, contender.prediction
        if prediction is None or prediction.fastest_k != old:
            return False
        contender.k_max = contender.deepest(max(old, min(2 * old, self.furthest)))
        if contender.k_max > old:
            message = f"k = {old} was predicted to be best, so larger ones were considered, too"
            self.notices.append(f"{contender.draft}: {message}")
        return contender.k_max > old

    def depths(self, contender: Contender) -> list[int]:
        """The ks at which a draft is measured."""
        if contender.k is not None:
            return [contender.k]
        shape = contender.tree
        if shape is not None and not self.is_exhaustive:  # a trace predicts chains alone
            return [min(contender.deepest(self.k_max), shape.depth)]
        best = contender.predicted_best()
        if self.is_exhaustive or best is None:
            return list(range(1, contender.k_max + 1))
        return [best.k]

    def measure(
        self,
        arms: Sequence[tuple[Contender, int, Arm]],
        plain_arm: Arm,
        stopped: Callable[[], bool],
        in_turn: bool = True,
    ) -> Generator[Progress, None, None]:
        """Measure drafts, each at a k, and one plain arm.

        Args:
            arms: at least one.
            plain_arm: decodes without a draft.
            stopped: asked between steps and passes; what is whole by then is kept.
            in_turn: whether the arms take turns.
        """
        (_, _, draft_arm), others = arms[0], [arm for *_, arm in arms[1:]]
        pace = self.batch_size, self.repeats, in_turn
        self._bench = bench = Bench(
            self.workload, draft_arm, plain_arm, others, *pace, notices=self.notices, journal=self.journal
        )
        for contender, k, arm in arms:
            contender.tracks[k] = bench.against.get(arm.name, bench.draft)
        for contender in self.contenders:
            if not contender.drafts:
                contender.tracks[0] = bench.plain
        yield from bench.run(stopped)

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
        tracks = [track for contender in self.contenders if contender.drafts for track in contender.tracks.values()]
        return bool(self.plain.passes) and any(track.passes for track in tracks)

    def speedup(self, contender: Contender, kind: Kind = "decode", task: str | None = None) -> Interval | None:
        """Speed-up of a draft at its best k over no draft."""
        return speedup(self.track(contender), self.plain, kind, task)

    def speedup_at(self, contender: Contender, k: int) -> Interval | None:
        """Speed-up of a draft at any measured k over no draft."""
        return speedup(contender.tracks[k], self.plain)

    def best_k(self, contender: Contender) -> int:
        """The measured k of the largest speed-up, the smaller of equals."""
        by_k = {k: speeds(track, self.plain, "decode") for k, track in contender.tracks.items()}
        return max(by_k, key=lambda k: (-1.0 if (s := by_k[k]) is None else float(np.median(s[0] / s[1])), -k))

    def track(self, contender: Contender) -> Track:
        """The passes of a draft at its best k."""
        return contender.tracks[self.best_k(contender)]

    def ranking(self) -> list[Contender]:
        """The drafts, the fastest first; unmeasured ones come last."""
        speedups = {contender: self.speedup(contender) for contender in self.contenders}
        medians = {contender: 0.0 if speedup is None else speedup.median for contender, speedup in speedups.items()}
        return sorted(self.contenders, key=lambda contender: -medians[contender])

    def pairs(self) -> list[tuple[Contender, Contender, Paired]]:
        """Every two drafts that were measured, each at its best k, the first of the ranking before the other."""
        compared = ((a, b, against(self.track(a), self.track(b))) for a, b in combinations(self.ranking(), 2))
        return [(a, b, paired) for a, b, paired in compared if paired is not None]

    def outputs(self) -> list[Sequence[int]]:
        """Every output without a draft."""
        return [tokens for pass_ in self.plain.passes for tokens in pass_.run.token_ids or ()]

    def differences(self) -> DifferencesResult:
        """Every output of every draft against the same request's output without one."""
        tracks = [track for contender in self.contenders if contender.drafts for track in contender.tracks.values()]
        return differences(compared_outputs(tracks, self.plain))
