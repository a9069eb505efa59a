"""Events of a training run: steps, evaluations and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec_cli.train.acceptance import HeldOutAcceptance


@dataclass(frozen=True, slots=True)
class Trained:
    """A step was taken.

    Args:
        step: its number, from 1.
        num_steps: of the run.
        loss: of the batch.
        matches: by depth, the share of positions where the draft's most likely token is the target's.
        learning_rate: of the step.
        num_tokens: tokens in the batch that count.
        seconds: that it took.
    """

    step: int
    num_steps: int
    loss: float
    matches: tuple[float, ...]
    learning_rate: float
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Acceptance was measured on the held-out prompts.

    Args:
        step: after which; 0 before the first.
        acceptance: that was found.
        is_best: it is the largest acceptance length so far, and the draft was written to the output folder.
        seconds: that it took.
    """

    step: int
    acceptance: HeldOutAcceptance
    is_best: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint was written after a step."""

    step: int


TrainingEvent = Trained | Evaluated | Saved
