"""Where the time of a step goes: the parts of a step with a draft, beside a step without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec_cli.document import Result, computed

if TYPE_CHECKING:
    from specdec_cli.measure.bench.passes import Track


class StepSplit(Result):
    """Seconds of a step's parts, all sequences together.

    Args:
        plain_step_seconds: a step without a draft.
        plain_forward_seconds: of it the target's forward.
        draft_seconds_per_step: drafting.
        verify_seconds_per_step: the target's forward over the drafted tokens and one more.
        overhead_seconds_per_step: the rest.
        tokens_per_step: that one sequence gets from a step.
        drafted_per_step: that are verified in it.
    """

    plain_step_seconds: float
    plain_forward_seconds: float
    draft_seconds_per_step: float
    verify_seconds_per_step: float
    overhead_seconds_per_step: float
    tokens_per_step: float
    drafted_per_step: float

    @property
    def step_seconds(self) -> float:
        """A step with the draft."""
        return self.draft_seconds_per_step + self.verify_seconds_per_step + self.overhead_seconds_per_step

    @computed
    def draft_share(self) -> float:
        """Share of a step's time that drafting takes."""
        return self.draft_seconds_per_step / self.step_seconds

    @computed
    def verify_cost_ratio(self) -> float:
        """Verification's forward over a plain step's."""
        return self.verify_seconds_per_step / self.plain_forward_seconds

    @computed
    def breakeven_tokens_per_step(self) -> float:
        """Tokens per step from which on the draft pays: what a step costs, in plain steps."""
        return self.step_seconds / self.plain_step_seconds

    @computed
    def speedup_with_free_draft(self) -> float:
        """Decode speed-up if drafting took no time."""
        return self.tokens_per_step * self.plain_step_seconds / (self.step_seconds - self.draft_seconds_per_step)


def costs_of(draft: Track, plain: Track) -> StepSplit | None:
    """The costs that two arms' steps had, with a draft and without; None where one of them took no time."""
    with_draft, without = draft.counts(), plain.counts()
    if not (plain.num_steps and draft.num_steps and without.verify_seconds and with_draft.verify_seconds):
        return None
    return StepSplit(
        plain_step_seconds=plain.meter.decode_seconds / plain.num_steps,
        plain_forward_seconds=without.verify_seconds / plain.num_steps,
        draft_seconds_per_step=with_draft.draft_seconds / draft.num_steps,
        verify_seconds_per_step=with_draft.verify_seconds / draft.num_steps,
        overhead_seconds_per_step=with_draft.overhead_seconds / draft.num_steps,
        tokens_per_step=with_draft.num_emitted_tokens / with_draft.num_steps,
        drafted_per_step=with_draft.num_draft_tokens / with_draft.num_steps,
    )
