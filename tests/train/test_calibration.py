"""Sequential temperature scaling: the fit against a plain implementation, and a run that ends with it."""

import json
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import ignore, never, session, tiny_target
from typed import not_none

from specdec_cli.train.acceptance import engine_with
from specdec_cli.train.calibration import calibration_errors, fitted_temperatures, observed_confidences

GRID = [0.1 * 10 ** (i / 20) for i in range(41)]


def plain_error(survivals: list[float], came_true: list[bool]) -> float:
    """The mean distance of bins' mean probabilities from their shares, each bin by its size."""
    bins: dict[int, list[tuple[float, bool]]] = {}
    for survival, is_true in zip(survivals, came_true, strict=True):
        bins.setdefault(min(int(survival * 15), 14), []).append((survival, is_true))
    gaps = [
        len(its) * abs(sum(p for p, _ in its) / len(its) - sum(is_true for _, is_true in its) / len(its))
        for its in bins.values()
    ]
    return sum(gaps) / len(survivals)


def plain_fit(logits: list[list[float]], accepted: list[int]) -> list[float]:
    """The temperatures, position by position."""
    found, before = [], [1.0] * len(logits)
    for position in range(len(logits[0])):
        came_true = [num > position for num in accepted]
        options = {t: [b / (1 + exp(-z[position] / t)) for b, z in zip(before, logits, strict=True)] for t in GRID}
        found.append(min(GRID, key=lambda t: plain_error(options[t], came_true)))
        before = options[found[-1]]
    return found


def sharpened(num: int, depth: int, factors: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts that are accepted with probability σ(z), and their logits as a head says them: z times a factor."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(num, depth, generator=generator, dtype=torch.float64)
    hits = torch.rand(num, depth, generator=generator) < logits.sigmoid()
    return logits * torch.tensor(factors), hits.long().cumprod(1).sum(1)


def test_the_fit_is_that_of_a_plain_implementation() -> None:
    logits, accepted = sharpened(150, 3, [3.0, 0.5, 1.0])
    found = fitted_temperatures(logits, accepted)
    assert found.temperatures == pytest.approx(plain_fit(logits.tolist(), accepted.tolist()))
    survivals = [1 / (1 + exp(-z)) for z in logits[:, 0].tolist()]
    assert found.ece_before[0] == pytest.approx(plain_error(survivals, [num > 0 for num in accepted.tolist()]))
    assert found.ece_after == pytest.approx(calibration_errors(logits, accepted, found.temperatures))


def test_the_temperatures_undo_what_sharpened_the_confidences() -> None:
    factors = [4.0, 0.4, 2.0]
    found = fitted_temperatures(*sharpened(20_000, 3, factors))
    assert found.temperatures == pytest.approx(factors, rel=0.3)
    assert max(found.ece_after) < 0.02 < min(found.ece_before)


def test_a_dspark_run_ends_with_temperatures_that_its_draft_is_loaded_with(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "method": "dspark",
        "layers": "1-2",
        "num_layers": 1,
        "max_steps": 2,
        "evaluate_every": 2,
    }
    found = session(tiny_target(tmp_path / "target"), tmp_path / "head", **settings)
    list(found.start(found.answer(ignore, never), is_resumed=False).run(never))
    calibration = not_none(found.calibrate())
    stored = json.loads((tmp_path / "head" / "dspark_sts.json").read_text(encoding="utf-8"))
    assert stored["temperatures"] == calibration.temperatures
    assert len(calibration.temperatures) == 3
    again = engine_with(found.engine, tmp_path / "head", 3)
    logits, accepted = observed_confidences(again, found.data.held_out, found.params, 3)
    assert len(logits) == calibration.num_samples > 0
    assert calibration_errors(logits, accepted) == pytest.approx(calibration.ece_after, abs=1e-4)
