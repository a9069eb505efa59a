"""Calibration of a DSpark draft's confidences by sequential temperature scaling (arXiv 2607.05147).

The head predicts of each drafted token whether it is accepted if those before it are: c_i = σ(z_i / τ_i). Position by
position, τ_i is the temperature that makes the product of c_0 to c_i the best calibrated probability that all of these
tokens are accepted; the temperatures before it stay. The file has SGLang's form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec_cli.drafters.heads import HeadDrafter
from specdec_cli.engine.driver import Driver
from specdec_cli.events import Stepped
from specdec_cli.train.disk import replace_text

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.sampling.params import SamplingParams
    from specdec_cli.train.answers import TrainingPrompt

_CANDIDATES = torch.logspace(-1, 1, 41, dtype=torch.float64)
_NUM_BINS = 15


@dataclass(frozen=True, slots=True)
class Calibration:
    """Temperatures of a draft's confidences.

    Args:
        temperatures: of each position of a block.
        num_samples: steps that they were fitted on.
        ece_before: of each position, the expected calibration error of all temperatures 1.
        ece_after: the same with these temperatures.
    """

    temperatures: list[float]
    num_samples: int
    ece_before: list[float]
    ece_after: list[float]

    def write(self, path: Path) -> None:
        """Write the file that the draft is loaded with.

        Raises:
            RunError: the disk is full, or the folder cannot be written.
        """
        replace_text(path, json.dumps(asdict(self), indent=2) + "\n")


def fitted_temperatures(logits: Tensor, num_accepted: Tensor) -> Calibration:
    """Fit the temperatures.

    Args:
        logits: of the confidences at temperature 1 [n, depth].
        num_accepted: tokens of each draft that were accepted [n].
    """
    temperatures, errors = [], []
    before = torch.ones(len(logits), dtype=torch.float64)
    for position, column in enumerate(logits.double().T):
        is_accepted = num_accepted > position
        survivals = before * (column / _CANDIDATES[:, None]).sigmoid()
        candidates = torch.tensor([calibration_error(survival, is_accepted) for survival in survivals])
        best = int(candidates.argmin())
        temperatures.append(float(_CANDIDATES[best]))
        errors.append(float(candidates[best]))
        before = survivals[best]
    return Calibration(temperatures, len(logits), calibration_errors(logits, num_accepted), errors)


def calibration_errors(
    logits: Tensor, num_accepted: Tensor, temperatures: Sequence[float] | None = None
) -> list[float]:
    """The expected calibration error of every position's survival; arguments as `fitted_temperatures` has them."""
    scaled = logits.double() / torch.tensor(temperatures or [1.0] * logits.shape[1], dtype=torch.float64)
    survivals = scaled.sigmoid().cumprod(1)
    return [calibration_error(its, num_accepted > i) for i, its in enumerate(survivals.T)]


def calibration_error(probabilities: Tensor, is_accepted: Tensor) -> float:
    """The expected calibration error of probabilities [n] of what came true or not [n], in 15 bins of equal width."""
    bins = (probabilities * _NUM_BINS).long().clamp(max=_NUM_BINS - 1)
    gaps = torch.zeros(_NUM_BINS, dtype=torch.float64).index_add_(0, bins, probabilities - is_accepted.double())
    return float(gaps.abs().sum()) / len(probabilities)


def observed_confidences(
    engine: Engine, prompts: Sequence[TrainingPrompt], params: SamplingParams, depth: int
) -> tuple[Tensor, Tensor]:
    """Decode prompts, and collect of every step with a whole draft its confidences' logits and what was accepted.

    Args:
        engine: idle, with the draft, whose temperatures are all 1.
        prompts: to decode.
        params: how outputs are sampled.
        depth: tokens of a whole draft.

    Returns:
        Logits [n, depth] float64 and accepted tokens [n] int64.
    """
    drafter, logits, accepted = engine.drafter, [torch.empty(0, depth, dtype=torch.float64)], []
    assert isinstance(drafter, HeadDrafter), "a confidence head is part of a head"
    with engine.one_thread, Driver(engine) as driver:
        for prompt in prompts:
            driver.add(list(prompt.tokens), replace(params, index=prompt.index), depth)
        for events in driver.steps():
            by_handle: dict[int, list[float]] = {}
            for handles, sure in drafter.confidences:
                for handle, confidence in zip(handles, sure.tolist(), strict=True):
                    by_handle.setdefault(handle, []).append(confidence)
            for each in (each for event in events if isinstance(event, Stepped) for each in event.emitted):
                if each.num_drafted == depth == len(by_handle.get(each.sequence_id, ())):
                    logits.append(torch.tensor([by_handle[each.sequence_id]], dtype=torch.float64).logit(1e-9))
                    accepted.append(each.num_accepted)
    return torch.cat(logits), torch.tensor(accepted, dtype=torch.int64)
