"""The document of `generate`: `specdec.generate/1`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec_cli.engine.comparison import as_document
from specdec_cli.report.schema import read_schema

if TYPE_CHECKING:
    from specdec_cli.engine.comparison import Comparison
    from specdec_cli.engine.decoding import Decoding, Request
    from specdec_cli.recipe import Recipe

SCHEMA = "specdec.generate/1"


@dataclass(frozen=True, slots=True)
class Promise:
    """The promise of a verification mode.

    Args:
        verify: the mode, resolved.
        is_lossless: whether its output follows the target's distribution.
        keeps_tokens: whether its output is, token for token, that of decoding without a draft.
    """

    verify: str
    is_lossless: bool
    keeps_tokens: bool = False

    @classmethod
    def of(cls, recipe: Recipe) -> Promise:
        """The promise of a recipe's mode at its temperature: at 0 `typical` verifies greedily, too."""
        from specdec_cli.engine.verify import resolve_mode, rule_of

        asked = recipe.speculation.verify, recipe.sampling.temperature
        rule = rule_of(*asked)
        return cls(resolve_mode(*asked), rule.is_lossless, rule.keeps_tokens)


def generate_body(
    arm: Decoding, requests: Sequence[Request], promise: Promise, comparison: Comparison | None = None
) -> dict[str, Any]:
    """The document's own fields, after those that every document has.

    Args:
        arm: whose outputs these are.
        requests: what it decoded; gives the rows' ids and categories.
        promise: of the mode it decoded with.
        comparison: the run without a draft beside it, if there was one.
    """
    rows = {request.row.index: request.row for request in requests}
    outputs = []
    for output in arm.outputs():
        row = rows[output.index]
        named = {"id": row.id, "category": row.category, "turn": row.turn}
        named = {key: value for key, value in named.items() if value is not None}
        outputs.append(output.as_dict() | named)
    body: dict[str, Any] = {
        "outputs": outputs,
        "totals": {"speculative": arm.counts().as_dict(), "timing": arm.timing().as_dict()},
        "lossless": lossless(promise, comparison),
    }
    if comparison is not None:
        body["compare"] = as_document(comparison)
    return body


def lossless(promise: Promise, comparison: Comparison | None) -> dict[str, Any]:
    """The `lossless` object; what was checked is null where nothing was."""
    checked = comparison is not None and comparison.equal is not None
    differences = comparison.differences() if comparison is not None and checked else []
    first = {"index": differences[0][0], "position": differences[0][1]} if differences else None
    return {
        "promised": promise.is_lossless,
        "verify": promise.verify,
        "checked_tokens": comparison.num_checked_tokens if comparison is not None and checked else None,
        "mismatches": len(differences) if checked else None,
        "first_divergence": first,
    }


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the whole document."""
    return read_schema("generate")
