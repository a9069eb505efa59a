"""The part of a `sweep-k` document that a sweep on another engine has beside a sweep on ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from specdec_cli.document import Count, Result, Seconds, absent

if TYPE_CHECKING:
    from specdec_cli.measure.elsewhere.engine_sweep import EngineSize, EngineSweep


class TraceSource(Result):
    """Requests, bytes and seconds of the trace through the engine's server."""

    requests: Count
    bytes: Count
    seconds: Seconds


class FittedCosts(Result):
    """Costs of steps: without a draft, what drafting adds whatever k is, and what each drafted token adds.

    `error` has fitted over measured seconds, less 1, by k and p-min; the costs rest on the runs at `fitted_on`.
    """

    batch_size: Count
    plain_seconds: Seconds
    base_seconds: float
    seconds_per_token: float
    seconds_per_stop: float | None = absent("Of a draft pass that ends a draft with p-min.")
    fitted_on: list[Count]
    error: dict[str, float]


class EngineSweepResult(Result):
    """Settings, starts and fitted costs of the engine."""

    speculative_config: dict[str, Any]
    rule: str
    starts: list[Count] = Field(description="k of every start, 0 without a draft.")
    p_mins: list[float] | None = absent("p-min of every start, 0 without; absent where none has one.")
    source: TraceSource
    costs: list[FittedCosts]
    median_error: Seconds = Field(description="Of predicted speed-ups against all that were measured, sign aside.")


def engine_sweep_result(sweep: EngineSweep, config: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The document's part about another engine's starts."""
    assert sweep.traced is not None, "a sweep that has run has a trace"
    p_mins = [shape.p_min for shape in sweep.starts]
    return EngineSweepResult(
        speculative_config=config,
        rule=sweep.traced.verify,
        starts=[shape.k for shape in sweep.starts],
        p_mins=p_mins if any(p_mins) else None,
        source=TraceSource(requests=sweep.num_requests, bytes=sweep.num_bytes, seconds=seconds),
        costs=[_fitted(at_size) for at_size in sweep.by_size],
        median_error=sweep.median_error(),
    ).as_json()


def _fitted(at_size: EngineSize) -> FittedCosts:
    fitted = at_size.fitted
    return FittedCosts(
        batch_size=at_size.batch_size,
        plain_seconds=fitted.plain_seconds,
        base_seconds=fitted.base_seconds,
        seconds_per_token=fitted.seconds_per_token,
        seconds_per_stop=fitted.seconds_per_stop,
        fitted_on=[shape.k for shape in fitted.fitted_on],
        error={str(run.shape).removeprefix("k = "): fitted.error(run) for run in at_size.runs.values() if run.k},
    )
