"""Acceptance of a draft on held-out prompts, measured by the engine that will run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specdec_cli.engine.build import another_drafter
from specdec_cli.events import SpeculativeCounts
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.train.events import HeldOutAcceptance

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.train.answers import TrainingPrompt


def engine_with(engine: Engine, folder: Path, k: int) -> Engine:
    """The engine's target with the draft in a folder.

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

    Raises:
        UsageError: the draft does not fit the target.
        RunError: it does not load.
    """
    drafting = engine_with(engine, folder, k)
    outputs = drafting.generate(
        [list(prompt.tokens) for prompt in prompts], [replace(params, index=prompt.index) for prompt in prompts]
    )
    counts = SpeculativeCounts()
    for output in outputs:
        counts.outcomes.update(output.speculative.outcomes)
    return HeldOutAcceptance(
        k=k,
        acceptance_length=counts.acceptance_length or 1.0,
        acceptance_rate=counts.acceptance_rate or 0.0,
        acceptance_by_depth=[rate or 0.0 for rate in counts.per_position_acceptance_rates],
        num_steps=counts.num_drafts,
    )
