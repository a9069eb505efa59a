"""Counts of a replay in the form in which an engine counts."""

from collections.abc import Sequence
from typing import Any

from specdec_cli.measure.predict.replay import Replay
from specdec_cli.measure.stats import FloatArray


def expected_counts(one: Replay) -> dict[str, Any]:
    """Counts and rates of a replay under the keys of `SpeculativeCounts.as_dict`, without seconds."""
    drafts, drafted = one.num_drafts.sum(), one.num_draft_tokens.sum()
    accepted = one.num_accepted_tokens.sum()
    return {
        "num_drafts": float(drafts),
        "num_draft_tokens": float(drafted),
        "num_accepted_tokens": float(accepted),
        "num_emitted_tokens": float(one.num_emitted.sum()),
        "acceptance_rate": float(accepted / drafted) if drafted else None,
        "acceptance_length": float(1 + accepted / drafts) if drafts else None,
        "per_position_acceptance_rates": _rates(one.accepted_at_least, one.drafted_at_least),
        "conditional_acceptance_rates": _rates(one.accepted_at_least, one.reached),
        "acceptance_histogram": one.histogram.sum(axis=0).tolist(),
    }


def _rates(numerators: FloatArray, denominators: FloatArray) -> list[float | None]:
    pairs: Sequence[tuple[float, float]] = list(zip(numerators.sum(axis=0), denominators.sum(axis=0), strict=True))
    return [float(a / b) if b else None for a, b in pairs]
