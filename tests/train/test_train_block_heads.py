"""Training of DFlash2 and DSpark drafts: losses and gradients against the formulas, and fitted drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, prod
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
from specdec_cli.train.methods.dflash import DFlashModule, DFlashTraining, PredictedRows
from specdec_cli.train.samples import Sample, TrainingBatch

CANDIDATES = 16


def method_for(lm, name: str, **settings: Any) -> DFlashTraining:
    depth = BLOCK if name == "dspark" else BLOCK - 1
    method = method_of(lm, name, depth=depth, layers="1-2-3", num_layers=2, mask_token=MASK, **settings)
    assert isinstance(method, DFlashTraining)
    method.prepare([])
    return method


def made(lm, name: str) -> tuple[DFlashTraining, DFlashModule]:
    """A method and its network, which is no longer what it begins as."""
    method = method_for(lm, name)
    module = method.build()
    assert isinstance(module, DFlashModule)
    generator = torch.Generator().manual_seed(2)
    for weight in module.weights.values():
        weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
    return method, module


def selector_loss(weights: dict[str, Tensor], unary: Tensor, state: Tensor, before: int, label: int) -> Tensor:
    """Cross-entropy of the label among the candidates, whose last one it replaces where it is none."""
    candidates = unary.sort(descending=True).indices[:CANDIDATES].tolist()
    if label not in candidates:
        candidates = [*candidates[:-1], label]
    name = "candidate_selector."
    latent = weights[f"{name}predecessor_codebook"][before] * (weights[f"{name}hidden_projection.weight"] @ state)
    scores = [unary[one] + (latent * weights[f"{name}successor_codebook"][one]).sum() for one in candidates]
    return torch.stack(scores).logsumexp(0) - scores[candidates.index(label)]


def row_loss(name: str, given: BlockReference, states: Tensor, i: int, before: list[int], p: Tensor) -> Tensor:
    """Of row i of a block, its weight in the loss included."""
    if name == "dflash2":
        unary = given.unary(states[i])
        divergence = (p * (p.log() - unary.log_softmax(-1))).sum()
        selected = selector_loss(given.weights, unary, states[i], before[i - 1], int(p.argmax()))
        return exp(-max(i - 1, 0) / (BLOCK / 2)) * (divergence + selected)
    q = given.logits(states[i : i + 1], torch.tensor(before[i : i + 1]))[0].softmax(-1)
    sure = given.confidence(states[i : i + 1], torch.tensor(before[i : i + 1]))[0]
    accepted = 1 - (p - q).abs().sum().detach() / 2
    binary = -(accepted * sure.log() + (1 - accepted) * (1 - sure).log())
    return exp(-i / 4) * (-0.1 * (p * q.log()).sum() + 0.9 * (p - q).abs().sum() + binary)


def reference_loss(
    name: str, module: DFlashModule, batch: TrainingBatch, samples: list[Sample]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of blocks at every token of the answers, and the weights that it depends on."""
    weights = {key: one.detach().clone().requires_grad_() for key, one in module.weights.items()}
    given = BlockReference(weights, module.embedding, module.output_layer)
    shift, losses = 1 if name == "dspark" else 0, []
    for number, sample in enumerate(samples):
        features = not_none(batch.features)[number, : len(sample.tokens)]
        starts = list(range(sample.num_prompt_tokens, len(sample.tokens) - 1))
        for start, states in zip(starts, given.states(features, sample.tokens, starts), strict=True):
            for i in range(1 - shift, BLOCK):
                place = start + i + shift
                if place < len(sample.tokens):
                    p = batch.logits[number, place - 1].softmax(-1)
                    losses.append(row_loss(name, given, states, i, list(sample.tokens[start:]), p))
    return torch.stack(losses).sum() / len(losses), weights


@pytest.mark.parametrize("name", ["dflash2", "dspark"])
def test_the_loss_is_that_of_the_formulas(lm, name: str) -> None:
    method, module = made(lm, name)
    samples = samples_of(((9, 16), (4, 9)))
    batch = batch_of(lm, method, samples)
    found = module(batch)
    found.value.backward()
    expected, weights = reference_loss(name, module, batch, samples)
    expected.backward()
    torch.testing.assert_close(found.value, expected, atol=1e-5, rtol=1e-5)
    assert len(found.matches) == method.depth
    for key, weight in module.weights.items():
        torch.testing.assert_close(weight.grad, weights[key].grad, atol=2e-5, rtol=1e-3, msg=key)


Fault = Callable[[PredictedRows], PredictedRows]
FAULTS: dict[str, Fault] = {
    "the token itself, not the one before": lambda rows: replace(rows, before=rows.p.argmax(-1)),
    "no decay": lambda rows: replace(rows, decays=torch.ones_like(rows.decays)),
    "targets of other rows": lambda rows: replace(rows, p=rows.p.roll(1, 0)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["dflash2", "dspark"])
def test_planted_faults_change_the_loss(lm, name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, module = made(lm, name)
    samples = samples_of(((9, 16), (4, 9)))
    batch = batch_of(lm, method, samples)
    expected, _ = reference_loss(name, module, batch, samples)
    loss_of = module.loss_of
    monkeypatch.setattr(module, "loss_of", lambda rows: loss_of(FAULTS[fault](rows)))
    with torch.no_grad():
        assert abs(float(module(batch).value - expected)) > 1e-3


def test_matches_are_the_selectors_own(lm) -> None:
    """A label that is no candidate is none that the draft would draft, though it takes the last one's place."""
    _, module = made(lm, "dflash2")
    logits = torch.arange(97.0).flip(0).expand(2, -1)
    p = torch.full((2, 97), -9.0)
    p[0, 0], p[1, 50] = 9.0, 9.0
    for weight in module.weights.values():
        weight.data.zero_()
    states, first = torch.ones(2, module.output_layer.shape[1]), torch.zeros(2, dtype=torch.long)
    depths = torch.tensor([0, 1])
    rows = PredictedRows(states, logits, p.log_softmax(-1), first, first, first, depths, torch.ones(2))
    assert module.loss_of(rows).matches.tolist() == [1.0, 0.0, 0.0, 0.0]


def expected_pace(likely: list[float]) -> list[float]:
    """Of one block, by the formula."""
    products = [prod(0.5 + 0.5 * one for one in likely[: end + 1]) for end in range(len(likely))]
    return [sum(products[begin:]) for begin in range(len(likely))]


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark"])
def test_d_pace_weighs_rows_by_what_is_accepted_from_there_on(lm, name: str) -> None:
    """The first block of each sample is whole, the last one is cut by the answer's end."""
    method = method_for(lm, name, position_weights="d-pace", loss="ce")
    module, found = method.build(), list[PredictedRows]()
    assert isinstance(module, DFlashModule)
    samples = samples_of(((9, 16), (4, 9)))
    batch, loss_of = batch_of(lm, method, samples), module.loss_of
    module.loss_of = lambda rows: found.append(rows) or loss_of(rows)
    value = module(batch).value
    [rows] = found
    q = rows.logits.log_softmax(-1)
    weights = module.row_weights(rows, q)
    for block in rows.blocks.unique():
        its = rows.blocks == block
        likely = q[its].exp()[range(int(its.sum())), rows.tokens[its]].tolist()
        assert rows.depths[its].tolist() == [*range(len(likely))]
        torch.testing.assert_close(weights[its], torch.tensor(expected_pace(likely)))
    assert not weights.requires_grad
    texts = [sample.tokens[sample.num_prompt_tokens + 1 :] for sample in samples]
    assert rows.tokens[rows.depths == 0].tolist() == [token for text in texts for token in text]
    if name == "dflash":
        expected = -(weights * (rows.p.exp() * q).sum(-1)).sum() / len(q)
        torch.testing.assert_close(value, expected)


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("name", ["dflash2", "dspark"])
def test_a_draft_that_was_fitted_to_one_sample_is_always_right(lm, name: str, tmp_path: Path) -> None:
    sample, method = own_sample(lm), method_for(lm, name)
    fitted(lm, method, sample, tmp_path / "draft", steps=60)
    drafter = loaded(lm, tmp_path / "draft")
    assert drafter.published().source.kind.name == name
    assert drafter.most_depth == method.depth
    found = drafted_text(lm, drafter, sample, method.depth).speculative
    assert found.num_accepted_tokens == found.num_draft_tokens, "acceptance length is k + 1"


def test_settings(lm) -> None:
    dspark, dflash2 = method_for(lm, "dspark"), method_for(lm, "dflash2", loss="tv")
    assert (dspark.loss, dflash2.loss, method_of(lm, "dflash2").loss) == ("ce-tv", "tv", "kl")
    assert (dspark.block_size, dspark.settled()["loss_decay"], dflash2.block_size) == (BLOCK, 4.0, BLOCK)
    with pytest.raises(UsageError, match=r"`train\.sample_from_anchor` has no meaning for the method `dspark`"):
        method_of(lm, "dspark", sample_from_anchor=True)
    with pytest.raises(UsageError, match="a DSpark block of one row"):
        method_of(lm, "dspark", depth=1)
