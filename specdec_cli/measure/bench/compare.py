"""Drafts against each other: one target and one text, each draft at its own best k, and every pair compared.

Every draft is measured against the same plain arm. Pairs are groups of prompts that both decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from specdec_cli.measure.bench.bench import Bench, Plan, Progress
from specdec_cli.measure.bench.passes import Differences, Kind, Track, against, speeds
from specdec_cli.measure.machine.load import Load, look_at_load
from specdec_cli.measure.predict.cost import Costs
from specdec_cli.measure.predict.predict import Predicted, Prediction
from specdec_cli.measure.stats import Interval, Paired
from specdec_cli.measure.workload.workload import Workload

if TYPE_CHECKING:
    from specdec_cli.engine.arms import Arm
    from specdec_cli.measure.bench.journal import Journal
    from specdec_cli.text.shared_vocabulary import SharedVocabulary

NO_DRAFT = "none"


@dataclass(slots=True, eq=False)
class Contender:
    """One draft, whatever engine it runs on.

    Args:
        draft: its name in reports.
        method: how it drafts.
        costs: of its steps; None before they are measured, and where it never drafts.
        prediction: None where the trace does not tell.
        tracks: what was measured, by k.
    """

    draft: str
    method: str
    costs: Costs | None = None
    prediction: Prediction | None = None
    tracks: dict[int, Track] = field(default_factory=dict)

    @property
    def drafts(self) -> bool:
        """Whether it is a draft at all."""
        return self.method != NO_DRAFT

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
        return (None, None) if self.drafts else (0, 0)

    @property
    def most_depth(self) -> int | None:
        """The largest k that it can reach; None without a limit, and where that is not known."""
        return None

    @property
    def shared_vocabulary(self) -> SharedVocabulary | None:
        """Vocabulary that a draft with another tokenizer shares with the target; None of others."""
        return None


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
    notices: list[str] = field(default_factory=list)
    journal: Journal | None = None
    load: Load = field(default_factory=look_at_load)
    _bench: Bench | None = None

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
        plan = Plan(self.batch_size, self.repeats, in_turn)
        self._bench = bench = Bench(
            self.workload, plan, draft_arm, plain_arm, others, notices=self.notices, journal=self.journal
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
