"""Training of Medusa heads: losses and gradients against the formulas, and heads that were fitted to one sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from head_drafts import loaded
from safetensors.torch import load_file
from tiny_medusa import medusa_logits
from torch.nn import functional
from training_cases import batch_of, drafted_text, fitted, method_of, own_sample, samples_of, training_lm
from typed import not_none

from specdec_cli.errors import UsageError
from specdec_cli.train.methods.medusa import MedusaModule

DEPTH = 3


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory):
    return training_lm(tmp_path_factory.mktemp("target"), 2)


def shaken(module: MedusaModule) -> MedusaModule:
    """The same heads with residual blocks that change something."""
    generator = torch.Generator().manual_seed(2)
    for weight in module.weights.values():
        weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
    return module


def test_the_loss_is_that_of_the_formulas(lm) -> None:
    """Prompt tokens and padding do not count, and each head has the mean over its own tokens."""
    method, samples = method_of(lm, "medusa", depth=DEPTH, loss="ce"), samples_of()
    module = method.build()
    assert isinstance(module, MedusaModule)
    batch = batch_of(lm, method, samples)
    found = shaken(module)(batch)
    found.value.backward()
    weights = {name: one.detach().clone().requires_grad_() for name, one in module.weights.items()}
    each: list[list[torch.Tensor]] = [[] for _ in range(DEPTH)]
    for row, sample in enumerate(samples):
        logits = medusa_logits(weights, not_none(batch.features)[row, :, 0])
        for i in range(DEPTH):
            for t in range(sample.num_prompt_tokens - 1, len(sample.tokens) - 2 - i):
                p = batch.logits[row, t + 1 + i].softmax(-1)
                each[i].append(-(p * logits[t, i].log_softmax(-1)).sum())
    expected = torch.stack([torch.stack(its).mean() for its in each]).sum()
    expected.backward()
    torch.testing.assert_close(found.value, expected, atol=1e-5, rtol=1e-5)
    assert found.num_counted.tolist() == [len(its) for its in each] == [25 - 2 - 2 * i for i in range(DEPTH)]
    for name, weight in module.weights.items():
        torch.testing.assert_close(weight.grad, weights[name].grad, atol=1e-5, rtol=1e-4)


def test_heads_begin_as_the_targets_output_layer(lm) -> None:
    method, [sample] = method_of(lm, "medusa", depth=2), samples_of(((5, 20),))
    batch = batch_of(lm, method, [sample])
    module = method.build()
    assert isinstance(module, MedusaModule)
    states = not_none(batch.features)[0, 4:, 0]  # whose logits predict the answer
    first = functional.linear(states, module.weights["1.1.weight"])
    torch.testing.assert_close(first, batch.logits[0, 4:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(module._logits(states, 1), first)


def test_heads_that_were_fitted_to_one_sample_are_always_right(lm, tmp_path: Path) -> None:
    method, sample = method_of(lm, "medusa", depth=DEPTH, loss="ce"), own_sample(lm)
    fitted(lm, method, sample, tmp_path / "draft", rate=0.02)
    content = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (content["medusa_num_heads"], content["medusa_num_layers"]) == (DEPTH, 1)
    names = {f"{i}.{part}" for i in range(DEPTH) for part in ("0.linear.weight", "0.linear.bias", "1.weight")}
    assert set(load_file(tmp_path / "draft" / "medusa_lm_head.safetensors")) == names
    found = drafted_text(lm, loaded(lm, tmp_path / "draft"), sample, DEPTH).speculative
    assert found.num_accepted_tokens == found.num_draft_tokens, "acceptance length is k + 1"


def test_settings_of_other_methods_are_refused(lm) -> None:
    with pytest.raises(UsageError, match=r"`train.num_layers` has no meaning for the method `medusa`"):
        method_of(lm, "medusa", num_layers=2)
