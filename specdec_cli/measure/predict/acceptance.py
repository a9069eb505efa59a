"""Who verifies by the rules that a trace can replay, and whose sampled text it cannot predict."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from specdec_cli.measure.predict.engine_rules import ENGINE_RULES, engines_with


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
