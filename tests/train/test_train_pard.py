"""Training of PARD drafts: losses and gradients against plain forwards, which rows are kept, and a fitted draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_engine import letter_tokenizer
from tiny_models import VOCAB, make_tiny
from training_cases import batch_of, drafted_text, fitted, method_of, own_sample, samples_of, training_lm
from transformers import AutoModelForCausalLM, Mamba2Config

from specdec_cli.errors import UsageError
from specdec_cli.train.methods.pard import PardModule, PardTraining, masked_rows

DEPTH, MASK = 4, VOCAB + 3


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory):
    return training_lm(tmp_path_factory.mktemp("target"), 2)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = make_tiny("llama", tmp_path_factory.mktemp("start"), 5, vocab_size=VOCAB + 8)
    letter_tokenizer().save_pretrained(folder)
    return str(folder)


def made(lm, start: str, **settings: Any) -> PardTraining:
    method = method_of(lm, "pard", **{"depth": DEPTH, "start_from": start, "mask_token": MASK, "loss": "ce"} | settings)
    assert isinstance(method, PardTraining)
    return method


def test_the_loss_is_that_of_plain_forwards(lm, start: str) -> None:
    """Row by row: a forward over the text up to its start and the masks behind it, as a draft is asked."""
    method, samples = made(lm, start), samples_of()
    method.prepare(samples)
    module, batch = method.build(), batch_of(lm, method, samples)
    assert isinstance(module, PardModule)
    torch.manual_seed(4)
    rows = masked_rows(batch, DEPTH, MASK)
    torch.manual_seed(4)
    found = module(batch)
    found.value.backward()
    plain = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).train()
    total, nums = torch.zeros(()), [0] * DEPTH
    for row, place in rows.is_counted.nonzero().tolist():
        group, position = int(rows.groups[row, place]), int(rows.positions[row, place])
        text = [*samples[row].tokens[: position - group + 1], *[MASK] * group]
        q = plain(torch.tensor([text])).logits[0, -1, :VOCAB].log_softmax(-1)
        total = total - (batch.logits[row, position].softmax(-1) * q).sum()
        nums[group] += 1
        assert samples[row].num_prompt_tokens <= position + 1 < len(samples[row].tokens)
    expected = total / sum(nums)
    expected.backward()
    assert found.num_counted.tolist() == nums
    torch.testing.assert_close(found.value, expected, atol=1e-5, rtol=1e-5)
    gradients = {name: one.grad for name, one in plain.named_parameters()}
    for name, one in module.model.named_parameters():
        torch.testing.assert_close(one.grad, gradients[name], atol=2e-5, rtol=1e-3, msg=name)


def test_each_group_keeps_fewer_starts_of_the_one_before(lm, start: str) -> None:
    samples = samples_of(((10, 70), (1, 31)))
    rows = masked_rows(batch_of(lm, made(lm, start), samples), 8, MASK)
    for row, sample in enumerate(samples):
        num = len(sample.tokens) - sample.num_prompt_tokens
        before = set(range(sample.num_prompt_tokens - 1, len(sample.tokens) - 1))
        for group in range(1, 8):
            its = rows.groups[row] == group
            starts = (rows.positions[row][its] - group).tolist()
            assert set(starts) <= before, "each was kept in the group before"
            assert rows.tokens[row][its].unique().tolist() == [MASK]
            assert bool(rows.is_counted[row][its].all())
            assert len(starts) == len(set(starts)) <= int(num * max(0.7**group, 0.2))
            assert len(starts) >= int(num * max(0.7**group, 0.2)) - group, (
                "but those whose token would be behind the end"
            )
            before = set(starts)
    assert int((rows.groups == -1).sum()) > 0, "the shorter sample is padded"


def test_a_draft_that_was_fitted_to_one_sample_is_always_right(lm, start: str, tmp_path: Path) -> None:
    method, sample = made(lm, start), own_sample(lm)
    fitted(lm, method, sample, tmp_path / "draft", steps=80)
    content = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (content["pard_token"], content["spd_type"]) == (MASK, "pard")
    assert (tmp_path / "draft" / "tokenizer.json").is_file()
    found = drafted_text(lm, pard(lm, tmp_path / "draft"), sample, DEPTH).speculative
    assert found.num_accepted_tokens == found.num_draft_tokens, "acceptance length is k + 1"


def pard(lm, folder: Path) -> Any:
    from specdec_cli import drafters
    from specdec_cli.drafters.contract import Resources
    from specdec_cli.lm.load import load_lm

    drafter = drafters.create("pard", {"model": str(folder)})
    drafter.load(Resources(lambda name: load_lm(name, block_size=4, check=False), None, VOCAB, lm))
    return drafter


def test_what_cannot_begin_a_draft_is_refused(lm, start: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`pard` trains a language model, and there is none to begin with"):
        method_of(lm, "pard")
    with pytest.raises(UsageError, match="the mask token is `200`, and the vocabulary has 105 tokens"):
        made(lm, start, mask_token=200)
    other = make_tiny("llama", tmp_path / "other", 5)
    letter_tokenizer(without="ou").save_pretrained(other)
    with pytest.raises(UsageError, match=r"the tokenizers of target .* differ"):
        made(lm, str(other))
    Mamba2Config(vocab_size=VOCAB).save_pretrained(tmp_path / "mamba")
    save_file({"x": torch.ones(1)}, tmp_path / "mamba" / "model.safetensors")
    with pytest.raises(UsageError, match="has layers with a state, which cannot leave masks out"):
        made(lm, str(tmp_path / "mamba"))
