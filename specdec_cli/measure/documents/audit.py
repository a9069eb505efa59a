"""The document of `audit`, `specdec.audit/1`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainSerializer, WithJsonSchema

from specdec_cli.document import (
    Count,
    LosslessResult,
    PositionResult,
    Result,
    ResultDocument,
    Seconds,
    Share,
)

if TYPE_CHECKING:
    from specdec_cli.events import SpeculativeCounts
    from specdec_cli.measure.audit.audit import Audit


Kind = Literal["near-tie", "bug"]

FALSE_ALARM = 1e-6
"""A p-value below this is a difference."""


@dataclass(frozen=True, slots=True)
class Recheck:
    """The float32 target's logits at the same context."""

    prefers: Count
    top2_gap: Seconds | None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first difference of one output from plain decoding.

    Args:
        prompt: the row.
        position: place in the output, from 0.
        configuration: what was run.
        expected: plain decoding's token, or None where its output had ended.
        got: the token in its place, or None where the output had ended.
        top2_gap: the two likeliest tokens' difference at that context, in logits; None without a context to score.
        tolerance: the largest gap that rounding explains.
        kind: near-tie when both tokens are the top two and the gap is within the tolerance, else bug.
        recheck: float32's word, where the target runs in fewer bits and a float32 copy could be loaded.
    """

    prompt: Count
    position: Count
    configuration: str
    expected: Count | None
    got: Count | None
    top2_gap: Seconds | None
    tolerance: Seconds | None
    kind: Annotated[Kind, Field(serialization_alias="class")]
    recheck: Annotated[Recheck | None, Field(serialization_alias="float32")] = None


class RunCounts(Result):
    """Runs and what they verified.

    Args:
        prompts: rows that were decoded.
        tokens: compared, over all configurations.
        configurations: ways of decoding that were compared with plain decoding.
        runs: of one configuration over a group of prompts, as many as the time limit allowed.
        planned_runs: all of them.
        num_draft_tokens: drafted and verified; 0 would prove nothing.
        num_accepted_tokens: accepted drafts.
    """

    prompts: Count = 0
    tokens: Count = 0
    configurations: Count = 0
    runs: Count = 0
    planned_runs: Count = 0
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0


class CheckedCounts(RunCounts):
    """All checks together."""

    draws: Count


class Compared(RunCounts):
    """Tokens against plain decoding, in one mode, and each output's first difference."""

    mode: Literal["greedy", "gumbel"]
    mismatches: Annotated[list[Mismatch], PlainSerializer(len), WithJsonSchema({"type": "integer", "minimum": 0})] = (
        Field(default_factory=list)
    )

    def add_run(self, number: int, counts: SpeculativeCounts) -> None:
        """Add one run of configuration `number`, counted from 1."""
        self.configurations = max(self.configurations, number)
        self.runs += 1
        self.num_draft_tokens += counts.num_draft_tokens
        self.num_accepted_tokens += counts.num_accepted_tokens


@dataclass(frozen=True, slots=True)
class DistributionCheck:
    """One verification mode's draws against the exact joint distribution.

    Args:
        configuration: model, mode and k.
        vocab: tokens that can occur at a position.
        draws: sequences drawn.
        statistic: Pearson's chi-square; None where a sequence was drawn that cannot occur.
        p_value: chance of a statistic this large if all is well.
        degrees_of_freedom: of the statistic.
        cells: sequences that can occur.
        detectable_shift: total-variation shift that so many draws find with 99 % power at FALSE_ALARM.
        num_draft_tokens: drafted and verified.
        num_accepted_tokens: accepted drafts.
    """

    configuration: str
    vocab: Count
    draws: Count
    statistic: Seconds | None
    p_value: Share
    degrees_of_freedom: Count
    cells: Count
    detectable_shift: Share
    num_draft_tokens: Count
    num_accepted_tokens: Count

    @property
    def is_fine(self) -> bool:
        """Whether the draws could well come from the exact distribution."""
        return self.p_value >= FALSE_ALARM


class AuditDocument(ResultDocument):
    """An audit."""

    schema_name: ClassVar[str] = "specdec.audit/1"

    mode: str
    checked: CheckedCounts
    equality: list[Compared]
    mismatches: list[Mismatch]
    distribution: list[DistributionCheck]
    lossless: LosslessResult
    notices: list[str]
    seconds: Seconds
    verdict: Literal["pass", "fail"]


def audit_body(audit: Audit) -> dict[str, Any]:
    """The document's own fields, after those that every document has."""
    compared, draws = list(audit.compared.values()), audit.distribution
    everything: list[Compared | DistributionCheck] = [*compared, *draws]
    first = audit.mismatches[0] if audit.mismatches else None
    num_tokens = sum(mode.tokens for mode in compared)
    return AuditDocument(
        mode=",".join(audit.plan.modes),
        checked=CheckedCounts(
            prompts=max((mode.prompts for mode in compared), default=0),
            tokens=num_tokens,
            configurations=sum(mode.configurations for mode in compared) + len(draws),
            runs=sum(mode.runs for mode in compared) + len(draws),
            planned_runs=sum(mode.planned_runs for mode in compared) + audit.num_planned_tests,
            draws=sum(draw.draws for draw in draws),
            num_draft_tokens=sum(part.num_draft_tokens for part in everything),
            num_accepted_tokens=sum(part.num_accepted_tokens for part in everything),
        ),
        equality=compared,
        mismatches=audit.mismatches,
        distribution=draws,
        lossless=LosslessResult(
            promised=True,
            verify=",".join(audit.verify_modes()),
            checked_tokens=num_tokens or None,
            mismatches=len(audit.mismatches) if num_tokens else None,
            first_divergence=None if first is None else PositionResult(index=first.prompt, position=first.position),
        ),
        notices=audit.notices,
        seconds=audit.seconds,
        verdict="pass" if audit.passed else "fail",
    ).as_json()
