"""The document of `sweep-k`, `specdec.sweep-k/1`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from specdec_cli.document import Count, Ends, Figure, Interval, LosslessResult, Result, ResultDocument, absent
from specdec_cli.measure.documents.engine_sweep import EngineSweepResult
from specdec_cli.measure.documents.parts import (
    UNCHECKED,
    EngineResult,
    GateResult,
    WorkloadResult,
    engine_of_another,
    lossless,
)
from specdec_cli.measure.documents.replayed import ReplayedResult, replayed_figures
from specdec_cli.measure.machine.load import Conditions
from specdec_cli.measure.predict.cost import ProfileLoad
from specdec_cli.measure.predict.evidence import Recommendation
from specdec_cli.recipe.values import schedule_text

if TYPE_CHECKING:
    from specdec_cli.engine.promise import Promise
    from specdec_cli.measure.bench.study import Measured, SizeStudy, Study
    from specdec_cli.measure.predict.cost import Costs
    from specdec_cli.measure.predict.predict import Predicted
    from specdec_cli.measure.workload.workload import Workload


class SweepPlan(Result):
    """Range of a sweep: `settled_after` counts the groups after which more passes would not have changed the choice."""

    k_max: Count
    exhaustive: bool
    measured_k: list[Count]
    measured_trees: list[str]
    trees: list[str] = Field(default=[], description="What --tree named, and the recipe's own.")
    batch_size: Count
    batch_sizes: list[Count]
    chat: bool = False
    repeats: Count
    order: Literal["A B B A", "A A B B"]
    passes: Count
    interrupted: bool
    resumed: Count = 0
    settled_after: Count | None


class TraceFacts(Result):
    """The trace that predictions rest on."""

    file: str | None
    read: bool
    draft: str
    prompts: Count
    tokens: Count


class TreeCostsResult(Result):
    """Seconds of a step that drafts a tree."""

    target_seconds: float
    draft_seconds: float
    overhead_seconds: float


class ContextCosts(Result):
    """Seconds at one length of the context."""

    target_seconds_by_rows: list[float]
    draft_seconds_by_k: list[float]


class CostsResult(ContextCosts):
    """Measured costs of steps; `rounds_in_turn` counts the rounds that were taken between the passes."""

    draft_seconds_per_token: float
    overhead_seconds: float
    overhead_seconds_by_k: list[float]
    by_tree: dict[str, TreeCostsResult]
    context_length: Count
    by_context: dict[str, ContextCosts]
    batch_size: Count
    repeats: Count
    rounds_in_turn: Count
    seconds: float
    load: ProfileLoad


class TimeShares(Result):
    """Shares of a step's time."""

    draft: float
    verify: float
    overhead: float


class PredictedResult(ReplayedResult):
    """One k or tree, by the trace; `tokens_per_second` is of decoding, all prompts together."""

    speedup: Figure
    ci95: Ends
    pairs: Count
    shares: TimeShares | None
    tokens_per_second: Figure


class MeasuredResult(Result):
    """One k or tree, measured; `tokens_per_second` is of decoding, all passes together."""

    speedup: Figure
    tokens_per_second: Figure
    ci95: Ends
    pairs: Count
    acceptance_length: Figure
    acceptance_rate: Figure
    per_position_acceptance_rates: list[Figure]


class ShapeResult(Result):
    """One k or tree; its acceptance length is the trace's, and without one that of the measured steps."""

    acceptance_length: Figure
    predicted: PredictedResult | None
    measured: MeasuredResult | None


class ChainShape(Result):
    """Drafted tokens that follow one another."""

    k: Count


class StaticTree(Result):
    """A tree, as --tree takes it."""

    tree: str
    nodes: Count
    depth: Count


class ChainResult(ShapeResult, ChainShape):
    """One k."""


class TreeResult(ShapeResult, StaticTree):
    """One static tree."""


class UnsureResult(ShapeResult, ChainShape):
    """One k with a p-min, below which the draft's probability of a token ends the draft before it."""

    p_min: float


class BatchSizeResult(Result):
    """The result at one batch size; trees come the smallest first."""

    batch_size: Count
    measured_k: list[Count]
    settled_after: Count | None
    costs: CostsResult
    rows: list[ChainResult]
    trees: list[TreeResult]
    by_p_min: list[UnsureResult] | None = absent("Every k with each p-min; absent where p-min was not swept.")
    recommended: Recommendation


class TableResult(Result):
    """Acceptance with the recommended table of k, prompts coming one after another."""

    max_num_seqs: Count
    tokens_per_step: Interval
    acceptance_length: Interval
    acceptance_rate: Interval
    share_of_steps: dict[str, float] = Field(description="By how many sequences ran together.")


class LengthByK(ChainShape):
    """Predicted acceptance length at one k."""

    acceptance_length: Interval


class AcceptanceByK(LengthByK):
    """Predicted acceptance at one k."""

    acceptance_rate: Interval


class StretchResult(Result):
    """Predicted acceptance of steps that begin at some output positions."""

    from_: Count = Field(alias="from")
    to: Count
    by_k: list[LengthByK]


class TextbookResult(Result):
    """The textbook's prediction, by one probability of acceptance for every token."""

    alpha: Figure
    speedup_by_k: dict[str, Figure]


class SweepDocument(ResultDocument):
    """A sweep over k and trees. Figures are the smallest batch size's; `by_batch_size` has every one's."""

    schema_name: ClassVar[str] = "specdec.sweep-k/1"

    workload: WorkloadResult
    plan: SweepPlan
    machine: Conditions
    trace: TraceFacts | None
    costs: CostsResult
    rows: list[ChainResult]
    trees: list[TreeResult]
    recommended: Recommendation
    by_batch_size: list[BatchSizeResult]
    k_by_batch: str = Field(description="What --k-by-batch takes.")
    table: TableResult | None
    by_task: dict[str, list[AcceptanceByK]]
    by_position: list[StretchResult]
    guidance: list[Count] = Field(description="Published smallest and largest k.")
    iid: TextbookResult
    break_even_alpha: Figure
    draft_seconds_for_2x: Figure
    ceiling: Figure
    cost_ratio: Figure
    lossless: LosslessResult
    engine: EngineResult | None = engine_of_another()
    engine_sweep: EngineSweepResult | None = absent("What a sweep on another engine rests on; absent elsewhere.")
    notices: list[str]
    gates: list[GateResult] = Field(default_factory=list)


def sweep_body(
    study: Study,
    workload: Workload,
    plan: Mapping[str, Any],
    promise: Promise,
    tokens_must_agree: bool,
    machine: Conditions,
    trace: Mapping[str, Any] | None,
    notices: list[str],
    engine_sweep: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The document's own fields, after those that every document has. `gates` is empty until the gates are judged."""
    from specdec_cli.measure.predict.predict import PUBLISHED_K
    from specdec_cli.measure.predict.replay import by_position, by_task

    by_size = [_by_size(at_size) for at_size in study.known()]
    smallest, prediction = by_size[0], study.by_size[0].prediction
    replays = [] if prediction is None else [row.replayed for row in prediction.chains]
    figures = ("break_even_alpha", "draft_seconds_for_2x", "ceiling", "cost_ratio")
    return SweepDocument(
        workload=workload,
        plan=SweepPlan(
            measured_k=smallest.measured_k,
            measured_trees=[row.tree for row in smallest.trees if row.measured is not None],
            batch_size=study.by_size[0].batch_size,
            batch_sizes=[at_size.batch_size for at_size in study.by_size],
            passes=len(study.passes()),
            settled_after=smallest.settled_after,
            **plan,
        ),
        machine=machine,
        trace=trace,
        costs=smallest.costs,
        rows=smallest.rows,
        trees=smallest.trees,
        recommended=smallest.recommended,
        by_batch_size=by_size,
        k_by_batch=schedule_text(study.k_by_batch().items()),
        table=_table(study),
        by_task=by_task(replays) if replays else {},
        by_position=by_position(replays) if replays else [],
        guidance=PUBLISHED_K,
        iid=TextbookResult(
            alpha=None if prediction is None else prediction.alpha,
            speedup_by_k={str(row.k): row.iid_speedup for row in prediction.chains} if prediction is not None else {},
        ),
        **{name: None if prediction is None else getattr(prediction, name) for name in figures},
        lossless=lossless(promise, study.differences() if tokens_must_agree else UNCHECKED),
        engine_sweep=engine_sweep,
        notices=notices,
    ).as_json()


def _table(study: Study) -> TableResult | None:
    """Predicted acceptance with the recommended table of k; None for one batch size, or without a trace."""
    table = study.table()
    if table is None:
        return None
    num_steps = sum(table.steps_by_batch.values())
    return TableResult(
        max_num_seqs=max(table.steps_by_batch),
        tokens_per_step=table.tokens_per_step(),
        acceptance_length=table.acceptance_length(),
        acceptance_rate=table.acceptance_rate(),
        share_of_steps={str(size): num / num_steps for size, num in table.steps_by_batch.items()},
    )


def _by_size(study: SizeStudy) -> BatchSizeResult:
    """The result at one batch size."""
    return BatchSizeResult(
        batch_size=study.batch_size,
        measured_k=[shape.k for shape in study.measured() if shape.is_full_chain],
        settled_after=study.settled_after,
        costs=costs_result(study.costs),
        **_rows(study),
        recommended=study.recommended(),
    )


def live_rows(study: SizeStudy) -> dict[str, Any]:
    """The ks and trees as they were predicted and measured so far, with the keys of the document."""
    return {kind: [row.as_json() for row in rows] for kind, rows in _rows(study).items()} | {"recommended": None}


def _rows(study: SizeStudy) -> dict[str, Sequence[ShapeResult]]:
    """Every k and every tree, predicted and measured; with p-mins where there are any."""
    measured = study.measured()
    shapes = [(shape, _figures(study.predicted(shape), measured.get(shape))) for shape in study.every_shape()]
    unsure = [UnsureResult(k=shape.k, p_min=shape.p_min, **figures) for shape, figures in shapes if shape.p_min]
    return ({"by_p_min": unsure} if unsure else {}) | {
        "rows": [ChainResult(k=shape.k, **figures) for shape, figures in shapes if shape.is_full_chain],
        "trees": [
            TreeResult(tree=str(shape.tree), nodes=shape.num_nodes, depth=shape.k, **figures)
            for shape, figures in shapes
            if shape.tree is not None
        ],
    }


def _figures(predicted: Predicted | None, measured: Measured | None) -> dict[str, Any]:
    """The fields of a `ShapeResult`."""
    length = None if predicted is None else predicted.acceptance_length.median
    if predicted is None and measured is not None:
        length = measured.counts.acceptance_length
    return {
        "acceptance_length": length,
        "predicted": None if predicted is None else _predicted(predicted),
        "measured": None if measured is None else _measured(measured),
    }


@lru_cache(maxsize=256)
def _predicted(row: Predicted) -> PredictedResult:
    """A prediction, whose intervals are drawn once: a live table asks for them again and again."""
    speedup = row.speedup
    return PredictedResult(
        speedup=speedup.median,
        ci95=speedup.ci95,
        pairs=speedup.pairs,
        shares=row.shares(),
        tokens_per_second=row.tokens_per_second,
        **replayed_figures(row.replayed),
    )


def _measured(measured: Measured) -> MeasuredResult:
    counts, speedup = measured.counts, measured.speedup
    return MeasuredResult(
        speedup=speedup.median,
        tokens_per_second=measured.tokens_per_second,
        ci95=speedup.ci95,
        pairs=speedup.pairs,
        acceptance_length=counts.acceptance_length,
        acceptance_rate=counts.acceptance_rate,
        per_position_acceptance_rates=counts.per_position_acceptance_rates,
    )


def costs_result(costs: Costs) -> CostsResult:
    """The costs of steps, single figures at the context in the middle."""
    middle, num = costs.context_lengths.index(costs.middle_context), costs.k_max + 1
    target, draft = costs.target_seconds[:, :num], costs.draft_seconds[:, :num]
    return CostsResult(
        target_seconds_by_rows=target[middle].tolist(),
        draft_seconds_per_token=costs.draft_seconds_per_token(costs.middle_context),
        draft_seconds_by_k=draft[middle].tolist(),
        overhead_seconds=float(np.median(costs.overhead_seconds[:num])),
        overhead_seconds_by_k=costs.overhead_seconds[:num].tolist(),
        by_tree={
            str(tree): TreeCostsResult(
                target_seconds=float(costs.target_seconds[middle, column]),
                draft_seconds=float(costs.draft_seconds[middle, column]),
                overhead_seconds=float(costs.overhead_seconds[column]),
            )
            for column, tree in enumerate(costs.trees, num)
        },
        context_length=costs.middle_context,
        by_context={
            str(length): ContextCosts(target_seconds_by_rows=rows.tolist(), draft_seconds_by_k=by_k.tolist())
            for length, rows, by_k in zip(costs.context_lengths, target, draft, strict=True)
        },
        batch_size=costs.batch_size,
        repeats=costs.num_repeats,
        rounds_in_turn=costs.num_in_turn,
        seconds=costs.seconds,
        load=costs.load,
    )
