"""Acceptance predicted by a trace under every rule that it can replay, for engines whose costs are known elsewhere."""

from __future__ import annotations

from typing import Any

from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.trace import Trace

_SAMPLED = ("rejection", "block", "one-hot", "exact-match")


def acceptance_rows(trace: Trace, draft: str, k_max: int) -> list[dict[str, Any]]:
    """A row for each rule and k, with the document's keys.

    Args:
        trace: holds the draft.
        draft: its name.
        k_max: largest k.

    Raises:
        UsageError: the draft was traced for fewer tokens.
    """
    has_chance = not trace.is_greedy and trace.drafts[draft].most_depth is None
    rules = _SAMPLED if has_chance else ("greedy" if trace.is_greedy else "one-hot",)
    rows = []
    for rule in rules:
        for one in replay(trace, draft, rule, k_max):
            rows.append({"rule": rule, "k": one.k, **one.acceptance()})
    return rows
