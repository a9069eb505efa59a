"""Distillation: its loss in plain torch, the pruned target, and a draft that knows one text by heart."""

from pathlib import Path

import pytest
import torch
from tiny_engine import drafter, letter_tokenizer
from tiny_models import make_tiny
from training_cases import batch_of, drafted_text, fitted, method_of, own_sample, samples_of, training_lm
from transformers import AutoModelForCausalLM

from specdec_cli.errors import UsageError
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.train.losses import LOSSES
from specdec_cli.train.methods.distill import DistillModule


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> TransformersLM:
    return training_lm(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_are_those_of_the_formulas(lm: TransformersLM, loss: str) -> None:
    method, samples = method_of(lm, "distill", num_layers=2, loss=loss), samples_of()
    module, batch = method.build(), batch_of(lm, method, samples)
    assert isinstance(module, DistillModule)
    found = module(batch)
    found.value.backward()
    grads = {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}
    module.zero_grad()
    kl, tv, ce, num, same = (torch.zeros(()) for _ in range(5))
    for row, sample in enumerate(samples):
        logits = module.model(input_ids=torch.tensor([sample.tokens])).logits[0]
        for place in range(sample.num_prompt_tokens - 1, len(sample.tokens) - 1):
            p, q = batch.logits[row, place].softmax(-1), logits[place].softmax(-1)
            ce, kl = ce - (p * q.log()).sum(), kl + (p * (p / q).log()).sum()
            tv, num = tv + (1 - torch.minimum(p, q).sum()), num + 1
            same = same + float(p.argmax() == q.argmax())
    share = torch.exp(-3 * (1 - tv.detach() / num))
    wanted = {"kl": kl, "tv": tv, "ce": ce, "ce-tv": 0.1 * ce + 1.8 * tv, "hybrid": share * kl + (1 - share) * tv}[
        loss
    ] / num
    wanted.backward()
    torch.testing.assert_close(found.value, wanted, rtol=1e-4, atol=1e-5)
    assert found.matches.tolist() == pytest.approx([float(same / num)])
    for name, one in module.named_parameters():
        if name in grads:
            torch.testing.assert_close(grads[name], one.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_a_pruned_target_has_its_layers(lm: TransformersLM, tmp_path: Path) -> None:
    method = method_of(lm, "distill", num_layers=3, intermediate_size=20)
    method.prepare(samples_of())
    module = method.build()
    assert isinstance(module, DistillModule)
    assert method.settled()["layers"] == [0, 2, 5]
    whole = AutoModelForCausalLM.from_pretrained(method.target.folder).model.layers
    for layer, place in zip(module.model.model.layers, (0, 2, 5), strict=True):
        torch.testing.assert_close(layer.self_attn.q_proj.weight, whole[place].self_attn.q_proj.weight)
        assert layer.mlp.down_proj.weight.shape == (32, 20)
    method.save(module, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor([[5, 9, 60, 33]])
    torch.testing.assert_close(again(tokens).logits, module.model(tokens).logits)
    assert again.config.num_hidden_layers == 3
    assert again.config.intermediate_size == 20


def test_sizes_beyond_the_targets_are_refused(lm: TransformersLM) -> None:
    with pytest.raises(UsageError, match="`num_layers` is `7`, and the target has 6 layers"):
        method_of(lm, "distill", num_layers=7)
    with pytest.raises(UsageError, match="`intermediate_size` is `64`, and the target's is `48`"):
        method_of(lm, "distill", intermediate_size=64)
    with pytest.raises(UsageError, match="`hidden_size` is `64`, and the target's is `32`"):
        method_of(lm, "distill", hidden_size=64)
    with pytest.raises(UsageError, match="`num_attention_heads` is `3`, and 2 of the target share a key/value head"):
        method_of(lm, "distill", num_attention_heads=3)
    with pytest.raises(UsageError, match="`4` attention heads cannot share `1` key/value heads"):
        method_of(lm, "distill", num_attention_heads=4, num_key_value_heads=1)
    with pytest.raises(UsageError, match="`llama` model cannot have `30` channels and `4` heads"):
        method_of(lm, "distill", hidden_size=30)


def test_sizes_for_another_model_than_the_target_are_refused(lm: TransformersLM) -> None:
    with pytest.raises(UsageError, match=r"`train\.num_layers` prunes the target, and the draft begins as"):
        method_of(lm, "distill", start_from=lm.name, num_layers=2)


def test_a_target_that_cannot_be_narrowed_is_refused_at_once(tmp_path: Path) -> None:
    folder = make_tiny("starcoder2", tmp_path, 1)
    letter_tokenizer().save_pretrained(folder)
    lm = load_lm(str(folder), block_size=4, max_num_seqs=4, check=False)
    with pytest.raises(UsageError, match="feed-forward layers of a `starcoder2` model cannot be made narrower"):
        method_of(lm, "distill", intermediate_size=16)
    assert method_of(lm, "distill", num_layers=1).build()


def test_a_draft_that_knows_its_text_by_heart_is_accepted_whole(lm: TransformersLM, tmp_path: Path) -> None:
    method, sample = method_of(lm, "distill", num_layers=2), own_sample(lm)
    fitted(lm, method, sample, tmp_path, steps=150, rate=3e-3)
    draft = load_lm(str(tmp_path), block_size=4, max_num_seqs=4, check=False)
    assert drafted_text(lm, drafter(draft), sample, k=3).speculative.acceptance_rate == 1.0
