"""Distillation: its loss in plain torch, the pruned target, and a draft that knows one text by heart."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_engine import drafter, letter_tokenizer
from tiny_gguf import SIZES, write_gguf
from tiny_models import make_tiny
from training_cases import batch_of, drafted_text, fitted, method_of, own_sample, samples_of
from transformers import AutoModelForCausalLM
from typed import not_none

from specdec_cli.engine.engine import Engine
from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.measure.machine.machine import look
from specdec_cli.measure.machine.preflight import preflight
from specdec_cli.recipe import resolve
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.train.losses import LOSSES
from specdec_cli.train.methods.distill import DistillModule


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_are_those_of_the_formulas(lm: TransformersLM, loss: str) -> None:
    method, samples = method_of(lm, "distill", num_layers=2, loss=loss), samples_of()
    module, batch = method.build(), batch_of(lm, method, samples)
    assert isinstance(module, DistillModule)
    found = module(batch)
    found.value.backward()
    grads = {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}
    module.zero_grad()
    kl, tv, ce, nla, num, same = (torch.zeros(()) for _ in range(6))
    for row, sample in enumerate(samples):
        logits = module.model(input_ids=torch.tensor([sample.tokens])).logits[0]
        for place in range(sample.num_prompt_tokens - 1, len(sample.tokens) - 1):
            p, q = batch.logits[row, place].softmax(-1), logits[place].softmax(-1)
            ce, kl = ce - (p * q.log()).sum(), kl + (p * (p / q).log()).sum()
            tv, num = tv + (1 - torch.minimum(p, q).sum()), num + 1
            nla = nla - torch.minimum(p, q).sum().log()
            same = same + float(p.argmax() == q.argmax())
    share = torch.exp(-3 * (1 - tv.detach() / num))
    sums = {"kl": kl, "tv": tv, "ce": ce, "nla": nla, "ce-tv": 0.1 * ce + 1.8 * tv}
    wanted = {**sums, "hybrid": share * kl + (1 - share) * tv}[loss] / num
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
    with pytest.raises(UsageError, match="`--draft-vocab-size 9999` is more than the target's"):
        method_of(lm, "distill", draft_vocab_size=9999)
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


def test_a_reduced_vocabulary_keeps_the_most_frequent_tokens(lm: TransformersLM, tmp_path: Path) -> None:
    """Its texts are the target's; a token that it lacks is read as the rarest one, and never drafted."""
    method, sample = method_of(lm, "distill", num_layers=2, draft_vocab_size=20), own_sample(lm)
    fitted(lm, method, sample, tmp_path, steps=150, rate=3e-3)
    kept = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["draft_token_ids"]
    assert Counter(sample.tokens[sample.num_prompt_tokens :]).most_common(1)[0][0] == kept[0]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.get_input_embeddings().weight.shape == plain.lm_head.weight.shape == (20, 32)
    engine, prompt = Engine.load(lm.name, str(tmp_path)), list(sample.tokens[: sample.num_prompt_tokens])
    assert not preflight(resolve(sets=[f"target.model={lm.name}", f"draft.model={tmp_path}"]).recipe, look()).errors
    [output] = engine.generate([prompt], SamplingParams(max_new_tokens=30), 3)
    [expected] = Engine.load(lm.name, None).generate([prompt], SamplingParams(max_new_tokens=30))
    assert output.token_ids == expected.token_ids
    assert output.speculative.num_accepted_tokens > 5
    context = list(sample.tokens[:25])
    assert set(context) - set(kept)
    own = torch.tensor([[kept.index(token) if token in kept else 19 for token in context]])
    draft = not_none(engine.drafter.lm)
    scores = draft.score([Row(77, context, 1)])[0]
    torch.testing.assert_close(scores[kept], plain(own).logits[0, -1].detach(), atol=1e-4, rtol=1e-4)
    assert scores.isinf().sum() == len(scores) - 20
    guessed = not_none(draft.guess([Row(78, context, 1)], len(scores)))
    assert guessed.tokens == [[int(scores.argmax())]]


def test_a_reduced_vocabulary_is_for_drafts_of_its_target_alone(lm: TransformersLM, tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path / "other", 1)
    letter_tokenizer(without="the").save_pretrained(other)
    method = method_of(lm, "distill", num_layers=1, draft_vocab_size=20)
    method.prepare(samples_of())
    method.save(method.build(), tmp_path)
    with pytest.raises(UsageError, match=r"the tokenizers of target `.*` and draft `.*` differ"):
        Engine.load(str(other), str(tmp_path))
    with pytest.raises(UsageError, match=f"`{tmp_path}` is a draft: it has only 20 of its tokenizer's tokens"):
        Engine.load(str(tmp_path), None)
    with pytest.raises(UsageError, match=f"`{tmp_path}` is a draft with a reduced vocabulary"):
        method_of(lm, "distill", start_from=str(tmp_path))


def test_a_gguf_target_is_pruned_as_its_checkpoint_is(tmp_path: Path) -> None:
    write_gguf(make_tiny("qwen2", tmp_path / "hf", 1, **SIZES), tmp_path / "model.gguf", "Q4_K_M")
    gguf = load_lm(str(tmp_path / "model.gguf"), block_size=4, max_num_seqs=4, check=False)
    method = method_of(gguf, "distill", num_layers=1, intermediate_size=128, draft_vocab_size=50)
    method.prepare(samples_of())
    module = method.build()
    assert isinstance(module, DistillModule)
    assert module.model.model.layers[0].mlp.down_proj.weight.shape == (256, 128)
    first = int(not_none(method.drafted)[0])
    row = module.model.get_input_embeddings().weight[0].detach()
    torch.testing.assert_close(row, gguf.embed([first])[0].float(), rtol=0.01, atol=0.01)  # which is rounded


def test_a_reduced_vocabulary_of_another_size_is_refused(lm: TransformersLM, tmp_path: Path) -> None:
    method = method_of(lm, "distill", num_layers=1, draft_vocab_size=20)
    method.prepare(samples_of())
    method.save(method.build(), tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, "draft_token_ids": content["draft_token_ids"][:19]}), encoding="utf-8")
    with pytest.raises(RunError, match=r"in the configuration of `.*` are not 20 tokens"):
        Engine.load(lm.name, str(tmp_path))
