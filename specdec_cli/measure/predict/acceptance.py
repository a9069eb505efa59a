"""Acceptance predicted by a trace under every rule that it can replay, for engines whose costs are known elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from specdec_cli.measure.predict.engine_rules import ENGINE_RULES, engines_with
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


def rule_rows(rules: Iterable[str]) -> list[dict[str, Any]]:
    """Who verifies by each rule, with the document's keys; at temperature 0 all engines do by `greedy`."""
    return [
        {"rule": rule, "engines": ["every engine"] if rule == "greedy" else [one.words for one in engines_with(rule)]}
        for rule in dict.fromkeys(rules)
    ]


def sampled_faults(engine: str | None, version: str | None) -> list[str]:
    """Sentences about builds of an engine whose sampled text with speculation is not the target's.

    Args:
        engine: what serves the target, as `owned_by` of its models says; None where that is not known.
        version: its version; None where that is not known.
    """
    known = [one for one in ENGINE_RULES if one.engine == engine and one.fault is not None]
    return [
        f"{one.fault}: predictions above temperature 0 do not hold for that build"
        for one in known
        if version is None or _numbers(version) <= _numbers(one.version)
    ]


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version: `0.32.0+cpu` is 0, 32, 0."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
