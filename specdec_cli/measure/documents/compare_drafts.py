"""The document of `compare-drafts`, `specdec.compare-drafts/1`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from specdec_cli.document import (
    Count,
    Ends,
    Figure,
    Interval,
    LosslessResult,
    Result,
    ResultDocument,
    Seconds,
    Share,
    SpeculativeResult,
    TimingResult,
    TotalsResult,
    VocabularyResult,
)
from specdec_cli.measure.documents.bench import PassesPlan, passes_plan, totals
from specdec_cli.measure.documents.parts import (
    NO_INTERVAL,
    UNCHECKED,
    EngineResult,
    GateResult,
    SpeedupResult,
    WorkloadResult,
    engine_of_another,
    lossless,
)
from specdec_cli.measure.machine.load import Conditions
from specdec_cli.measure.predict.evidence import largest_words
from specdec_cli.measure.predict.ranking import RankingResult
from specdec_cli.recipe.gate import Verdict

if TYPE_CHECKING:
    from specdec_cli.engine.promise import Promise
    from specdec_cli.measure.bench.compare import Contender, DraftComparison


class ComparePlan(PassesPlan):
    """Order of the drafts' passes, and the largest k that was considered."""

    k_max: Count
    exhaustive: bool


class DraftTaskResult(Result):
    """A draft on the prompts of one task."""

    acceptance_rate: Share | None
    acceptance_length: Seconds | None
    speedup: Interval


class PredictedKResult(Result):
    """A draft at one k, by its trace."""

    k: Count
    acceptance_length: Interval
    speedup: Interval


class MeasuredKResult(Result):
    """A draft at one k, measured."""

    k: Count
    speedup: Interval


class DraftFigures(Result):
    """A draft at its best k: what it costs, accepts and gains."""

    draft: str
    memory_bytes: Count | None
    cost_ratio: Figure
    best_k: Count
    acceptance_rate: Share | None
    acceptance_length: Seconds | None
    speedup: Interval
    latency_speedup: Interval


class DraftResult(DraftFigures):
    """A draft, by task and at every k."""

    method: str
    parameters: Count | None
    vocabulary: VocabularyResult | None
    by_task: dict[str, DraftTaskResult]
    predicted: list[PredictedKResult] | None
    ranking: RankingResult | None = None
    measured: list[MeasuredKResult]
    timing: TimingResult
    speculative: SpeculativeResult


class PairResult(Result):
    """Two drafts on the same prompts."""

    a: str
    b: str
    speedup_ratio: float
    ci95: Ends
    p_a_faster: Share | None


class TaskWinnerResult(Result):
    """The fastest draft of a task, null where that is not certain."""

    draft: str | None
    speedup: Interval


class CompareDocument(ResultDocument):
    """A comparison of drafts."""

    schema_name: ClassVar[str] = "specdec.compare-drafts/1"

    workload: WorkloadResult
    plan: ComparePlan
    machine: Conditions
    plain: TotalsResult
    rows: list[DraftResult]
    pairwise: list[PairResult]
    task_winners: dict[str, TaskWinnerResult]
    winner: str | None
    speedup: SpeedupResult
    recommendation: str
    verdict: Verdict
    needs: list[str]
    lossless: LosslessResult
    engine: EngineResult | None = engine_of_another()
    notices: list[str]
    gates: list[GateResult] = Field(default_factory=list)


def compare_body(
    comparison: DraftComparison,
    promise: Promise,
    tokens_must_agree: bool,
    machine: Conditions,
    interrupted: bool,
) -> dict[str, Any]:
    """The document's own fields, after those that every document has. `gates` is empty until the gates are judged."""
    from specdec_cli.measure.bench.choice import choose_draft

    ranking, choice, bench = comparison.ranking(), choose_draft(comparison), comparison.bench
    best = choice.fastest or next(contender for contender in ranking if contender.drafts)
    largest = [
        f"{contender.draft} is fastest at k = {contender.k_max}; {largest_words(contender.k_max, contender.most_depth)}"
        for contender in ranking
        if contender.prediction is not None and comparison.best_k(contender) == contender.k_max
    ]
    known = [notice for notice in (comparison.workload.notice, bench.hidden_tasks) if notice is not None]
    decode, latency = comparison.speedup(best), comparison.speedup(best, "latency")
    return CompareDocument(
        workload=comparison.workload,
        plan=ComparePlan(
            k_max=max([comparison.k_max, *(contender.k_max for contender in comparison.contenders)]),
            exhaustive=comparison.is_exhaustive,
            **passes_plan(bench, interrupted),
        ),
        machine=machine,
        plain=totals(comparison.plain),
        rows=[_draft(comparison, contender) for contender in ranking],
        pairwise=[
            PairResult(
                a=a.draft,
                b=b.draft,
                speedup_ratio=paired.ratio.median,
                ci95=paired.ratio.ci95,
                p_a_faster=paired.p_a_faster,
            )
            for a, b, paired in comparison.pairs()
        ],
        task_winners={task: _task_winner(comparison, task) for task in ([] if bench.hidden_tasks else bench.tasks())},
        winner=choice.winner_name,
        speedup=SpeedupResult(decode=decode or NO_INTERVAL, latency=latency or NO_INTERVAL),
        recommendation=choice.recommendation,
        verdict=choice.verdict,
        needs=choice.needs,
        lossless=lossless(promise, comparison.differences() if tokens_must_agree else UNCHECKED),
        notices=[*known, *comparison.notices, *largest],
    ).as_json()


def live_drafts(comparison: DraftComparison) -> list[dict[str, Any]]:
    """The drafts as they were measured so far, the fastest first, with the keys of the document."""
    return [DraftFigures(**_figures(comparison, contender)).as_json() for contender in comparison.ranking()]


def _figures(comparison: DraftComparison, contender: Contender) -> dict[str, Any]:
    """The fields of `DraftFigures`."""
    counts = comparison.track(contender).counts()
    return {
        "draft": contender.draft,
        "memory_bytes": contender.sizes()[1],
        "cost_ratio": contender.cost_ratio,
        "best_k": comparison.best_k(contender),
        "acceptance_rate": counts.acceptance_rate,
        "acceptance_length": counts.acceptance_length,
        "speedup": comparison.speedup(contender) or NO_INTERVAL,
        "latency_speedup": comparison.speedup(contender, "latency") or NO_INTERVAL,
    }


def _draft(comparison: DraftComparison, contender: Contender) -> DraftResult:
    track, shared, predicted = comparison.track(contender), contender.shared_vocabulary, None
    if contender.prediction is not None:
        predicted = [
            PredictedKResult(k=row.k, acceptance_length=row.acceptance_length, speedup=row.speedup)
            for row in contender.prediction.rows
        ]
    return DraftResult(
        **_figures(comparison, contender),
        method=contender.method,
        parameters=contender.sizes()[0],
        vocabulary=None if shared is None else shared.result(comparison.outputs()),
        by_task={
            task: DraftTaskResult(
                acceptance_rate=track.counts(task).acceptance_rate,
                acceptance_length=track.counts(task).acceptance_length,
                speedup=comparison.speedup(contender, task=task) or NO_INTERVAL,
            )
            for task in comparison.bench.tasks()
            if task in track.task_counts
        },
        predicted=predicted,
        ranking=contender.ranking,
        measured=[
            MeasuredKResult(k=k, speedup=comparison.speedup_at(contender, k) or NO_INTERVAL)
            for k in sorted(contender.tracks)
        ],
        timing=track.timing(),
        speculative=track.counts(),
    )


def _task_winner(comparison: DraftComparison, task: str) -> TaskWinnerResult:
    from specdec_cli.measure.bench.choice import task_winner

    winner, speedup = task_winner(comparison, task)
    return TaskWinnerResult(draft=winner, speedup=speedup or NO_INTERVAL)
