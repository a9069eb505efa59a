"""Training of DFlash drafts: losses, masks and gradients against the formulas, and a fitted draft."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from head_drafts import loaded
from tiny_dflash import BLOCK, MASK, BlockReference
from torch import Tensor
from training_cases import batch_of, drafted_text, fitted, method_of, own_sample, samples_of
from typed import not_none

from specdec_cli.errors import UsageError
from specdec_cli.train.methods.dflash import DFlashModule, DFlashTraining, _spread_layers, loss_decay
from specdec_cli.train.samples import Sample, TrainingBatch

LAYERS = (1, 2, 3)


def made(lm, from_anchor: bool, **settings: Any) -> tuple[DFlashTraining, DFlashModule]:
    depth = BLOCK if from_anchor else BLOCK - 1
    given = {"depth": depth, "layers": "1-2-3", "num_layers": 2, "mask_token": MASK, "loss": "ce", **settings}
    method = method_of(lm, "dflash", sample_from_anchor=from_anchor, **given)
    assert isinstance(method, DFlashTraining)
    method.prepare([])
    module = method.build()
    assert isinstance(module, DFlashModule)
    generator = torch.Generator().manual_seed(2)
    for weight in module.weights.values():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return method, module


def reference_loss(
    module: DFlashModule, batch: TrainingBatch, samples: list[Sample], anchors: list[list[int]], from_anchor: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of blocks at these anchors, sample by sample without padding, and the weights that it depends on."""
    weights = {name: one.detach().clone().requires_grad_() for name, one in module.weights.items()}
    given = BlockReference(weights, module.embedding, module.output_layer)
    total, num = torch.zeros(()), 0
    for row, (sample, starts) in enumerate(zip(samples, anchors, strict=True)):
        features = not_none(batch.features)[row, : len(sample.tokens)]
        for start, states in zip(starts, given.states(features, sample.tokens, starts), strict=True):
            for i in range(0 if from_anchor else 1, BLOCK):
                place = start + i + (1 if from_anchor else 0)
                if place < len(sample.tokens):
                    p = batch.logits[row, place - 1].softmax(-1)
                    q = (states[i] @ module.output_layer.T).log_softmax(-1)
                    total = total - exp(-max(i - 1, 0) / (BLOCK / 2)) * (p * q).sum()
                    num += 1
    return total / num, weights


@pytest.mark.parametrize("num_anchors", [512, 3])
@pytest.mark.parametrize("from_anchor", [False, True])
def test_the_loss_is_that_of_the_formulas(lm, from_anchor: bool, num_anchors: int) -> None:
    """Blocks see the context before their anchor and themselves; prompts and padding do not count."""
    method, module = made(lm, from_anchor, num_anchors=num_anchors)
    samples = samples_of()
    batch = batch_of(lm, method, samples)
    torch.manual_seed(7)
    anchors, is_real = module.anchors(batch)
    its = [anchors[row][is_real[row]].tolist() for row in range(len(samples))]
    for one, sample in zip(its, samples, strict=True):
        every = range(sample.num_prompt_tokens, len(sample.tokens) - 1)
        assert one == sorted(set(one))
        assert set(one) <= set(every)
        assert len(one) == min(num_anchors, len(every))
    torch.manual_seed(7)
    found = module(batch)
    found.value.backward()
    expected, weights = reference_loss(module, batch, samples, its, from_anchor)
    expected.backward()
    torch.testing.assert_close(found.value, expected, atol=1e-5, rtol=1e-5)
    assert len(found.matches) == method.depth
    for name, weight in module.weights.items():
        torch.testing.assert_close(weight.grad, weights[name].grad, atol=2e-5, rtol=1e-3, msg=name)


FAULTS: dict[str, Any] = {
    "features one position off": lambda _, batch: replace(batch, features=not_none(batch.features).roll(1, 1)),
    "prompts count": lambda _, batch: replace(batch, is_counted=torch.ones_like(batch.is_counted)),
    "targets one position off": lambda _, batch: replace(batch, logits=batch.logits.roll(1, 1)),
    "another mask token": lambda module, batch: setattr(module, "_mask", 5) or batch,
    "no decay": lambda _, batch: batch,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_change_the_loss(lm, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, module = made(lm, False)
    samples = samples_of()
    batch = batch_of(lm, method, samples)
    every = [list(range(one.num_prompt_tokens, len(one.tokens) - 1)) for one in samples]
    expected, _ = reference_loss(module, batch, samples, every, False)
    with torch.no_grad():
        right = module(batch).value
        if fault == "no decay":
            monkeypatch.setattr(module, "_decay", 1e9)
        wrong = module(FAULTS[fault](module, batch)).value
    assert abs(float(right - expected.detach())) < 1e-4
    assert abs(float(wrong - expected.detach())) > 1e-3


def test_a_draft_that_was_fitted_to_one_sample_is_always_right(lm, tmp_path: Path) -> None:
    sample = own_sample(lm)
    for from_anchor in (False, True):
        folder = tmp_path / str(from_anchor)
        method, _ = made(lm, from_anchor)
        fitted(lm, method, sample, folder, steps=60)
        content = json.loads((folder / "config.json").read_text())
        assert content["block_size"] == BLOCK
        assert content["dflash_config"]["target_layer_ids"] == list(LAYERS)
        drafter = loaded(lm, folder)
        assert drafter.most_depth == method.depth
        found = drafted_text(lm, drafter, sample, method.depth).speculative
        assert found.num_accepted_tokens == found.num_draft_tokens, "acceptance length is k + 1"


def test_a_mask_token_is_the_last_that_no_text_has(lm) -> None:
    method = method_of(lm, "dflash")
    method.prepare(samples_of())
    assert isinstance(method, DFlashTraining)
    assert method.mask_token == lm.vocab_size - 1
    method.prepare([Sample([*range(lm.vocab_size), 96, 95], 0)])
    assert method.mask_token == 94
    with pytest.raises(UsageError, match="the mask token is `97`, and the vocabulary has 97 tokens"):
        method_of(lm, "dflash", mask_token=97)


def test_sizes_follow_the_target(lm) -> None:
    method = method_of(lm, "dflash")
    assert (method.taps, method.depth, method.settled()["num_layers"]) == ((0, 2, 5), 7, 1)
    assert _spread_layers(36) == (1, 9, 17, 25, 33)
    assert _spread_layers(1) == (0,)
    assert [loss_decay(size) for size in (16, 10, 8)] == [7.0, 5.0, 4.0]


def test_a_block_of_one_row_is_refused(lm) -> None:
    with pytest.raises(UsageError, match="a DFlash block of one row"):
        method_of(lm, "dflash", depth=1, sample_from_anchor=True)
