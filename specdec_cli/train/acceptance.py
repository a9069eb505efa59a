"""Acceptance of a draft on held-out prompts, measured by the engine that will run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_cli.engine.build import another_drafter
from specdec_cli.events import SpeculativeCounts
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.train.answers import TrainingPrompt


@dataclass(frozen=True, slots=True)
class HeldOutAcceptance:
    """How much of a draft was accepted.

    Args:
        k: drafted tokens in a step.
        length: tokens that a step gives on average, the target's own one included.
        rate: accepted of the drafted tokens.
        by_depth: of the steps, the share that accepted the token at each depth and all before it.
        num_steps: steps that were counted.
    """

    k: int
    length: float
    rate: float
    by_depth: tuple[float, ...]
    num_steps: int

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "k": self.k,
            "acceptance_length": round(self.length, 4),
            "acceptance_rate": round(self.rate, 4),
            "acceptance_by_depth": [round(one, 4) for one in self.by_depth],
            "num_steps": self.num_steps,
        }


def engine_with(engine: Engine, folder: Path, k: int) -> Engine:
    """The engine's target with the draft in a folder.

    Args:
        engine: with the target; its own draft is not used.
        folder: of the draft.
        k: drafted tokens in a step.

    Raises:
        UsageError: the draft does not fit the target.
        RunError: it does not load.
    """
    drafter = another_drafter(engine, {"model": str(folder)})
    options = replace(engine.options, num_speculative_tokens=k)
    return type(engine)(engine.target, drafter, engine.tokenizer, options, engine.eos_token_ids)


def measure_acceptance(
    engine: Engine, folder: Path, prompts: Sequence[TrainingPrompt], params: SamplingParams, k: int
) -> HeldOutAcceptance:
    """Decode held-out prompts with the draft in a folder.

    Args:
        engine: idle, with the target; its own draft is not used.
        folder: of the draft.
        prompts: to decode.
        params: how outputs are sampled.
        k: drafted tokens in a step.

    Raises:
        UsageError: the draft does not fit the target.
        RunError: it does not load.
    """
    its = engine_with(engine, folder, k)
    outputs = its.generate([list(one.tokens) for one in prompts], [replace(params, index=one.index) for one in prompts])
    found = SpeculativeCounts()
    for output in outputs:
        found.outcomes.update(output.speculative.outcomes)
    return HeldOutAcceptance(
        k,
        found.acceptance_length or 1.0,
        found.acceptance_rate or 0.0,
        tuple(one or 0.0 for one in found.per_position_acceptance_rates),
        found.num_drafts,
    )
