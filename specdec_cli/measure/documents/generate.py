"""The document of `generate`, `specdec.generate/1`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from specdec_cli.document import (
    Count,
    DifferencesResult,
    Figure,
    LosslessResult,
    PositionResult,
    Result,
    ResultDocument,
    TotalsResult,
    absent,
)
from specdec_cli.engine.output_result import OutputResult
from specdec_cli.measure.documents.parts import AcceptanceSource, lossless

if TYPE_CHECKING:
    from specdec_cli.engine.comparison import Comparison
    from specdec_cli.engine.decoding import Decoding, Request
    from specdec_cli.engine.outputs import Output
    from specdec_cli.engine.promise import Promise
    from specdec_cli.engine.prompts import PromptRow


class RatiosResult(Result):
    """The median of speed-ups, and those of every prompt."""

    median: Figure
    pairs: Count
    ratios: list[float]


class DecodeRatiosResult(Result):
    """The speed-up of decoding."""

    decode: RatiosResult


class ComparisonResult(Result):
    """The run without a draft beside the one with it; `equal` is null where tokens were not compared."""

    plain: TotalsResult
    speedup: DecodeRatiosResult
    equal: bool | None


class CommandResult(Result):
    """Another engine, and the command that started its server."""

    name: str
    version: str | None
    command: str
    acceptance_from: AcceptanceSource


class GenerateDocument(ResultDocument):
    """Outputs of prompts."""

    schema_name: ClassVar[str] = "specdec.generate/1"

    outputs: list[OutputResult]
    totals: TotalsResult
    lossless: LosslessResult
    compare: ComparisonResult | None = absent()
    engine: CommandResult | None = absent("The other engine that decoded; absent where specdec did.")


def generate_body(
    arm: Decoding, requests: Sequence[Request], promise: Promise, comparison: Comparison | None = None
) -> dict[str, Any]:
    """The document's own fields, after those that every document has."""
    rows = {request.row.index: request.row for request in requests}
    return GenerateDocument(
        outputs=[named_output(output, rows[output.index]) for output in arm.outputs()],
        totals=TotalsResult(speculative=arm.counts(), timing=arm.timing()),
        lossless=_lossless(promise, comparison),
        compare=None if comparison is None else compared(comparison),
    ).as_json()


def named_output(output: Output, row: PromptRow) -> OutputResult:
    """An output with the names of its row."""
    result = OutputResult.model_validate(output)
    result.id, result.category, result.turn = row.id, row.category, row.turn
    return result


def _lossless(promise: Promise, comparison: Comparison | None) -> LosslessResult:
    if comparison is None or comparison.equal is None:
        return lossless(promise)
    differences = comparison.differences()
    first = PositionResult(index=differences[0][0], position=differences[0][1]) if differences else None
    checked = comparison.num_checked_tokens
    result = DifferencesResult(checked_tokens=checked, mismatches=len(differences), first_divergence=first)
    return lossless(promise, result)


def compared(comparison: Comparison) -> ComparisonResult:
    """The run without a draft, and the speed-up over it."""
    plain, ratios = comparison.plain, comparison.ratios()
    decode = RatiosResult(median=comparison.speedup(), pairs=len(ratios), ratios=ratios)
    return ComparisonResult(
        plain=TotalsResult(timing=plain.timing(), speculative=plain.counts()),
        speedup=DecodeRatiosResult(decode=decode),
        equal=comparison.equal,
    )
