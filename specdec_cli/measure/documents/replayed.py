"""Acceptance that a trace predicts, with intervals over prompts, and the document `specdec.acceptance/1` of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from specdec_cli.document import Count, Ends, Figure, Interval, Result, ResultDocument, Seconds, absent

if TYPE_CHECKING:
    from specdec_cli.measure.predict.replay import Replay
    from specdec_cli.measure.predict.trace import Trace

_SAMPLED = ("rejection", "block", "one-hot", "exact-match")


class ReplayedResult(Result):
    """Acceptance at one k or of one tree; lists are for i = 1 to k, the histogram for 0 to k tokens."""

    acceptance_length: Interval
    acceptance_rate: Interval
    per_position_acceptance_rates: list[Figure]
    per_position_ci95: list[Ends]
    conditional_acceptance_rates: list[Figure]
    conditional_ci95: list[Ends]
    acceptance_histogram: list[float]


def replayed_figures(replay: Replay) -> dict[str, Any]:
    """The fields of a `ReplayedResult`."""
    by_depth = {"per_position": replay.marginal_rates(), "conditional": replay.conditional_rates()}
    return {
        "acceptance_length": replay.acceptance_length(),
        "acceptance_rate": replay.acceptance_rate(),
        **{f"{name}_acceptance_rates": [rate.median for rate in rates] for name, rates in by_depth.items()},
        **{f"{name}_ci95": [rate.ci95 for rate in rates] for name, rates in by_depth.items()},
        "acceptance_histogram": replay.histogram.sum(axis=0).tolist(),
    }


class RuleResult(Result):
    """A rule of verification and the engines that verify by it."""

    rule: str
    engines: list[str]


class RuleAtK(Result):
    """A rule that a trace can replay, and a k."""

    rule: Literal["greedy", "rejection", "block", "one-hot", "exact-match"]
    k: Count


class AcceptanceRow(ReplayedResult, RuleAtK):
    """One rule at one k."""


class TextSourceResult(Result):
    """Source of the text, and its cost; requests and bytes of servers alone."""

    kind: Literal["servers", "recorded"]
    words: str
    seconds: Seconds
    requests: Count | None = absent()
    bytes: Count | None = absent()


class AcceptanceDocument(ResultDocument):
    """A sweep through servers, or over recorded text."""

    schema_name: ClassVar[str] = "specdec.acceptance/1"

    target: str
    draft: str
    source: TextSourceResult
    prompts: Count
    tokens: Count
    k_max: Count
    rules: list[RuleResult]
    rows: list[AcceptanceRow]
    notices: list[str]


def acceptance_body(trace: Trace, draft: str, source: Mapping[str, Any], k_max: int) -> dict[str, Any]:
    """The document's own fields: acceptance by every rule that the trace can replay.

    Raises:
        UsageError: the draft was traced for fewer tokens.
    """
    from specdec_cli.measure.predict.engine_rules import rule_rows
    from specdec_cli.measure.predict.replay import replay

    has_chance = not trace.is_greedy and trace.drafts[draft].most_depth is None
    rules = _SAMPLED if has_chance else ("greedy" if trace.is_greedy else "one-hot",)
    replays = [(rule, replayed) for rule in rules for replayed in replay(trace, draft, rule, k_max)]
    return AcceptanceDocument(
        target=trace.target,
        draft=draft,
        source=source,
        prompts=len(trace.prompts),
        tokens=trace.num_emitted_tokens,
        k_max=k_max,
        rules=rule_rows(rules),
        rows=[AcceptanceRow(rule=rule, k=replayed.k, **replayed_figures(replayed)) for rule, replayed in replays],
        notices=trace.notices,
    ).as_json()
