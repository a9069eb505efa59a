"""The document of `bench`, `specdec.bench/1`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from specdec_cli.document import Count, Figure, LosslessResult, Result, ResultDocument, TotalsResult, absent
from specdec_cli.measure.bench.step_split import StepSplit, costs_of
from specdec_cli.measure.documents.parts import (
    NO_INTERVAL,
    UNCHECKED,
    AgainstResult,
    EngineResult,
    GateResult,
    SpeedupResult,
    WorkloadResult,
    engine_of_another,
    lossless,
)
from specdec_cli.measure.machine.load import Conditions
from specdec_cli.measure.machine.roofline import Roofline

if TYPE_CHECKING:
    from specdec_cli.engine.promise import Promise
    from specdec_cli.measure.bench.bench import Bench
    from specdec_cli.measure.bench.passes import Kind, Track

_ABOVE_THE_ROOF = 1.05


class PassesPlan(Result):
    """Order of the arms' passes: `group_sizes` counts the groups of prompts by their size."""

    batch_size: Count
    chat: bool = False
    group_sizes: dict[str, Count]
    repeats: Count
    order: Literal["A B B A", "A A B B"]
    passes: Count
    interrupted: bool
    resumed: Count = 0
    by: str | None = absent("The column that groups the prompts, where `--by` names one.")


class ArmsResult(Result):
    """Our own engine without a draft and with it."""

    plain: TotalsResult
    draft: TotalsResult
    speedup: SpeedupResult


class TaskResult(ArmsResult):
    """The prompts of one task."""

    num_prompts: Count


class BenchDocument(ResultDocument):
    """A benchmark."""

    schema_name: ClassVar[str] = "specdec.bench/1"

    workload: WorkloadResult
    plan: PassesPlan
    machine: Conditions
    plain: TotalsResult
    draft: TotalsResult
    speedup: SpeedupResult
    against: dict[str, AgainstResult]
    tokens_per_step: Figure
    efficiency: Figure
    costs: StepSplit | None
    roofline: Roofline | None
    by_task: dict[str, TaskResult]
    lossless: LosslessResult
    engine: EngineResult | None = engine_of_another()
    findings: list[str]
    notices: list[str]
    gates: list[GateResult] = Field(default_factory=list)


def bench_body(
    bench: Bench,
    promise: Promise,
    tokens_must_agree: bool,
    machine: Conditions,
    roofline: Roofline | None,
    versions: Mapping[str, str],
    interrupted: bool,
) -> dict[str, Any]:
    """The document's own fields, after those that every document has. `gates` is empty until the gates are judged."""
    from specdec_cli.measure.bench.verdict import sentences
    from specdec_cli.measure.machine.figures import figure

    missing: list[str] = []
    costs = figure("the cost of a step", lambda: costs_of(bench.draft, bench.plain), missing)
    efficiency = figure("the efficiency", lambda: bench.efficiency, missing)
    findings = figure("the verdict in words", lambda: sentences(bench, machine.busy), missing) or []
    known = [notice for notice in (bench.workload.notice, bench.hidden_tasks) if notice is not None]
    return BenchDocument(
        workload=bench.workload,
        plan=PassesPlan(**passes_plan(bench, interrupted)),
        machine=machine,
        **_arms(bench),
        against={
            name: AgainstResult(
                version=versions[name],
                timing=track.timing(),
                speedup=_speedup(bench, against=track),
                equal=bench.differences(track),
            )
            for name, track in bench.against.items()
        },
        tokens_per_step=bench.tokens_per_step,
        efficiency=efficiency,
        costs=costs,
        roofline=roofline,
        by_task={
            task: TaskResult(num_prompts=bench.workload.tasks[task], **_arms(bench, task)) for task in bench.tasks()
        },
        lossless=lossless(promise, bench.differences() if tokens_must_agree else UNCHECKED),
        findings=findings,
        notices=[*known, *bench.notices, *_too_fast(roofline), *missing],
    ).as_json()


def passes_plan(bench: Bench, interrupted: bool) -> dict[str, Any]:
    """The fields of a `PassesPlan`."""
    return {
        "batch_size": bench.batch_size,
        "group_sizes": {str(size): num for size, num in bench.group_sizes().items()},
        "repeats": bench.repeats,
        "order": bench.order,
        "passes": len(bench.passes),
        "interrupted": interrupted,
    }


def live_arms(bench: Bench) -> dict[str, Any]:
    """The arms as they were measured so far, with the keys of the document."""
    others = {name: {"timing": track.timing().as_dict()} for name, track in bench.against.items()}
    return ArmsResult(**_arms(bench)).as_json() | {"against": others}


def _arms(bench: Bench, task: str | None = None) -> dict[str, Any]:
    """The arms of our own engine and the draft's speed-up."""
    return {
        "plain": totals(bench.plain, task),
        "draft": totals(bench.draft, task),
        "speedup": _speedup(bench, task),
    }


def totals(track: Track, task: str | None = None) -> TotalsResult:
    """Timing and counts of an arm, in all passes or in one task's."""
    return TotalsResult(timing=track.timing(task), speculative=track.counts(task))


def _speedup(bench: Bench, task: str | None = None, against: Track | None = None) -> SpeedupResult:
    kinds: tuple[Kind, ...] = ("decode", "latency")
    return SpeedupResult(**{kind: bench.speedup(kind, task, against) or NO_INTERVAL for kind in kinds})


def _too_fast(roofline: Roofline | None) -> list[str]:
    """A figure above the roofline is no feat but a fault of the measurement."""
    roofs = [] if roofline is None else [roofline.plain, roofline.verify]
    if any(roof is not None and (roof.fraction or 0) > _ABOVE_THE_ROOF for roof in roofs):
        return ["a step was faster than the roofline: the machine was busy while its bandwidth was measured"]
    return []
