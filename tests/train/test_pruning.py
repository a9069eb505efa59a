"""Narrower models: what they keep of a target, and that they compute what the target does without the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import PROMPTS, decode, letter_tokenizer, tokens
from tiny_models import make_tiny
from torch.nn import functional
from training_cases import method_of, samples_of, training_lm
from transformers import AutoModelForCausalLM

from specdec_cli.errors import UsageError
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.recipe.schema import Train
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.train.methods.distill import DistillModule
from specdec_cli.train.pruning import Importance, importance_of, narrowed
from specdec_cli.train.samples import Sample
from specdec_cli.train.widths import Widths

TEXT = torch.tensor([[5, 9, 60, 33, 17, 17, 80]])
NARROW = {"hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> TransformersLM:
    return training_lm(tmp_path_factory.mktemp("target"), num_layers=2)


def pruned(lm: TransformersLM, **sizes: int) -> Any:
    """The model that distillation begins with, all layers of the target in it."""
    method = method_of(lm, "distill", num_layers=2, **sizes)
    method.prepare(samples_of())
    module = method.build()
    assert isinstance(module, DistillModule)
    return module.model


def whole_of(lm: TransformersLM) -> Any:
    return AutoModelForCausalLM.from_pretrained(lm.name, dtype=torch.float32)


def places(part: torch.Tensor, whole: torch.Tensor) -> list[int]:
    """Which rows of a matrix another one has."""
    return [int((whole == row).all(1).nonzero().item()) for row in part]


def test_the_targets_own_sizes_leave_it_as_it_is(lm: TransformersLM) -> None:
    same = pruned(lm, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    whole = whole_of(lm).state_dict()
    assert all(torch.equal(one, whole[name]) for name, one in same.state_dict().items())


def test_without_units_and_heads_it_computes_what_the_target_does_when_these_write_nothing(
    lm: TransformersLM,
) -> None:
    narrow, whole = pruned(lm, intermediate_size=20, num_attention_heads=2), whole_of(lm)
    assert (narrow.config.num_attention_heads, narrow.config.num_key_value_heads, narrow.config.head_dim) == (2, 1, 8)
    with torch.no_grad():
        for small, layer in zip(narrow.model.layers, whole.model.layers, strict=True):
            units = places(small.mlp.up_proj.weight, layer.mlp.up_proj.weight)
            rows = places(small.self_attn.q_proj.weight, layer.self_attn.q_proj.weight)
            assert rows in (list(range(16)), list(range(16, 32))), "heads that share a key/value head stay together"
            for weight, kept in ((layer.mlp.down_proj.weight, units), (layer.self_attn.o_proj.weight, rows)):
                gone = [place for place in range(weight.shape[1]) if place not in kept]
                weight[:, gone] = 0
    torch.testing.assert_close(narrow(TEXT).logits, whole(TEXT).logits, rtol=1e-4, atol=1e-4)


def test_without_channels_it_computes_what_the_target_does_when_these_are_zero(lm: TransformersLM) -> None:
    narrow, whole = pruned(lm, hidden_size=24), whole_of(lm)
    kept = places(narrow.model.embed_tokens.weight.T, whole.model.embed_tokens.weight.T)
    assert kept == sorted(kept)
    gone = [place for place in range(32) if place not in kept]
    with torch.no_grad():
        whole.model.embed_tokens.weight[:, gone] = 0
        for layer in whole.model.layers:
            layer.self_attn.o_proj.weight[gone] = 0
            layer.mlp.down_proj.weight[gone] = 0
        for name, one in whole.named_parameters():
            if "norm" in name:  # its mean is over 24 channels, not 32
                one *= (24 / 32) ** 0.5
    torch.testing.assert_close(narrow(TEXT).logits, whole(TEXT).logits, rtol=1e-4, atol=1e-4)


def test_importance_is_the_size_of_activations(tmp_path: Path) -> None:
    model = whole_of(training_lm(tmp_path, num_layers=1))
    layer, found = model.model.layers[0], importance_of(model, [Sample([token], 0) for token in (7, 40)])
    norms: list[torch.Tensor] = []

    def norm(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        norms.append(states * (states.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight)
        return norms[-1]

    with torch.no_grad():  # a token alone attends to itself
        states = model.model.embed_tokens.weight[[7, 40]]
        values = functional.linear(norm(states, layer.input_layernorm.weight), layer.self_attn.v_proj.weight)
        heads = values.view(2, 2, 8).repeat_interleave(2, 1)
        states = states + functional.linear(heads.flatten(1), layer.self_attn.o_proj.weight)
        inputs = norm(states, layer.post_attention_layernorm.weight)
        gate = functional.silu(functional.linear(inputs, layer.mlp.gate_proj.weight))
        units = gate * functional.linear(inputs, layer.mlp.up_proj.weight)
        norm(states + functional.linear(units, layer.mlp.down_proj.weight), model.model.norm.weight)
    torch.testing.assert_close(found.units[0], units.square().sum(0), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found.heads[0], heads.square().sum((0, 2)), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found.channels, sum(one.norm(dim=0) for one in norms), rtol=1e-3, atol=1e-5)


def test_a_long_text_counts_by_the_mean_of_its_tokens(lm: TransformersLM) -> None:
    model = whole_of(lm)
    once, twice = (importance_of(model, [Sample([7] * num, 0)]).channels for num in (1, 2))
    torch.testing.assert_close(once, twice, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ({"num_attention_heads": 4}, [0, 1, 2, 3]),
        ({"num_attention_heads": 2}, [2, 3]),  # 4 + 3 of the second key/value head, 1 + 5 of the first
        ({"num_key_value_heads": 1}, [2, 3]),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, [1, 2]),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, [1]),
    ],
)
def test_the_most_important_heads_stay(lm: TransformersLM, sizes: dict[str, int], kept: list[int]) -> None:
    whole = whole_of(lm)
    widths = Widths.of(whole.config).narrower(Train.model_validate(sizes))
    heads = [torch.tensor([1.0, 5.0, 4.0, 3.0])] * 2
    narrow = narrowed(whole, widths, Importance(torch.ones(32), [torch.ones(48)] * 2, heads))
    for name, names in (("q_proj", kept), ("k_proj", sorted({head // 2 for head in kept}))):
        small, large = (one.model.layers[0].self_attn.get_submodule(name).weight for one in (narrow, whole))
        assert places(small, large) == [8 * head + row for head in names for row in range(8)]
    assert narrow(TEXT).logits.isfinite().all()


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "olmo2", "smollm3", "granite"])
def test_narrower_models_load_in_transformers_and_our_engine(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / "target", 1, vectors=0.3)
    letter_tokenizer().save_pretrained(folder)
    lm = load_lm(str(folder), block_size=4, max_num_seqs=4, check=False)
    method = method_of(lm, "distill", num_layers=2, **NARROW)
    method.prepare(samples_of())
    module = method.build()
    assert isinstance(module, DistillModule)
    method.save(module, tmp_path / "draft")
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32, attn_implementation="eager")
    assert draft.num_parameters() < whole_of(lm).num_parameters()
    torch.testing.assert_close(draft(TEXT).logits, module.model(TEXT).logits)
    wanted = draft.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=8, do_sample=False)[0, len(PROMPTS[1]) :]
    ours = load_lm(str(tmp_path / "draft"), block_size=4, max_num_seqs=4, check=False)
    assert tokens(decode(ours, None, 0, [PROMPTS[1]], params=SamplingParams(max_new_tokens=8)))[0] == wanted.tolist()


def test_layers_keep_what_the_configuration_says_of_each(tmp_path: Path) -> None:
    folder = make_tiny("smollm3", tmp_path / "target", 1)  # every second of its four layers turns nothing
    letter_tokenizer().save_pretrained(folder)
    lm = load_lm(str(folder), block_size=4, max_num_seqs=4, check=False)
    method = method_of(lm, "distill", num_layers=3)
    module = method.build()
    assert isinstance(module, DistillModule)
    method.save(module, tmp_path / "draft")
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    assert draft.config.no_rope_layers == [whole_of(lm).config.no_rope_layers[i] for i in (0, 2, 3)]
    torch.testing.assert_close(draft(TEXT).logits, module.model(TEXT).logits)


@pytest.mark.parametrize(
    ("family", "sizes", "said"),
    [
        ("starcoder2", {"hidden_size": 16}, "cannot be made narrower: the layout of `model.layers.0.mlp.c_fc.weight`"),
        ("phi3", {"num_attention_heads": 2}, "the attention of a `phi3` model cannot lose heads"),
        ("qwen3_moe", {"intermediate_size": 16}, "feed-forward layers of a `qwen3_moe` model cannot be made narrower"),
        ("bitnet", {"num_attention_heads": 2}, "the layout of `model.layers.0.self_attn.attn_sub_norm.weight`"),
        ("bitnet", {"intermediate_size": 16}, "the layout of `model.layers.0.mlp.ffn_sub_norm.weight`"),
    ],
)
def test_unknown_layouts_are_refused_before_anything_is_trained(
    family: str, sizes: dict[str, int], said: str, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, 1)
    letter_tokenizer().save_pretrained(folder)
    lm = load_lm(str(folder), block_size=4, max_num_seqs=4, check=False)
    with pytest.raises(UsageError, match=said):
        method_of(lm, "distill", **sizes)


def test_layers_that_no_configuration_describes_are_refused(tmp_path: Path) -> None:
    folder = make_tiny("qwen3_moe", tmp_path, 1, num_hidden_layers=3, mlp_only_layers=[1])
    letter_tokenizer().save_pretrained(folder)
    lm = load_lm(str(folder), block_size=4, max_num_seqs=4, check=False)
    with pytest.raises(UsageError, match=r"of a `qwen3_moe` model cannot say that it has layers \[0, 2\] alone"):
        method_of(lm, "distill", num_layers=2)
