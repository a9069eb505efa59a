"""Parts that several documents have in common."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from specdec_cli.document import (
    Count,
    DifferencesResult,
    Ends,
    Interval,
    LosslessResult,
    Result,
    TimingResult,
    absent,
)
from specdec_cli.measure.elsewhere.near_ties import LeftText
from specdec_cli.measure.endpoint.request_counts import CountsSource
from specdec_cli.measure.workload.workload import Skipped

if TYPE_CHECKING:
    from specdec_cli.engine.promise import Promise

UNCHECKED = DifferencesResult()
NO_INTERVAL = Interval(nan, None, 0)
AcceptanceSource = Annotated[
    CountsSource | None,
    Field(description="Source of acceptance: every answer's own counts, else the server's counters."),
]


class WorkloadResult(Result):
    """The prompts that were decoded; `prompt_tokens` is null where another engine tokenizes them."""

    dataset: str
    num_prompts: Count
    prompt_tokens: Count | None
    tasks: dict[str, Count]
    skipped: list[Skipped]


class SpeedupResult(Result):
    """Speed-ups over the same engine without a draft: of decoding, and from a prompt's arrival to its end."""

    decode: Interval
    latency: Interval


class AgainstResult(Result):
    """Another engine beside ours: what it took, how much faster the draft is, and whether its tokens are the same."""

    version: str
    timing: TimingResult
    speedup: SpeedupResult
    equal: DifferencesResult


class GateResult(Result):
    """A gate and its result.

    Args:
        expression: what was asked.
        value: the figure or the verdict; None where nothing was measured, which fails.
        ci95: its interval, or None for a plain number.
        passed: whether the gate holds.
        reason: in words.
    """

    expression: str
    value: float | str | None
    ci95: Ends
    passed: bool
    reason: str


class EngineResult(Result):
    """The other engine that decoded, and where its output with a draft leaves its own plain text."""

    name: str
    version: str | None
    commands: dict[str, str]
    differences: list[LeftText]
    acceptance_from: AcceptanceSource


def engine_of_another() -> Any:
    """The field `engine` of a document, which is absent where specdec itself decoded."""
    return absent("The other engine that decoded; absent where specdec did.")


def lossless(promise: Promise, differences: DifferencesResult = UNCHECKED) -> LosslessResult:
    """Promise of a verification mode, and the result of comparing tokens."""
    return LosslessResult(promised=promise.is_lossless, verify=promise.verify, **dict(differences))
