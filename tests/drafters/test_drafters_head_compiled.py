"""A head's layer in compiled code: what it drafts is what torch's layer drafts, wherever its slots lie."""

import pytest
import torch
from head_drafts import TEXT, features_of, loaded, row
from tiny_engine import letter_tokenizer
from tiny_heads import HEADS, INNER, KV_HEADS, SIZE, publish, random_weights
from tiny_models import make_tiny

from specdec_cli.lm.heads import stacks
from specdec_cli.lm.heads.compiled_stack import CompiledStack
from specdec_cli.lm.heads.layer_stack import TorchStack
from specdec_cli.lm.load import load_lm
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape

SAMPLED = SamplingParams(temperature=1.0, seed=5)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = make_tiny("llama", tmp_path_factory.mktemp("target"), 1, num_hidden_layers=6)
    letter_tokenizer().save_pretrained(folder)
    return load_lm(str(folder), block_size=4, max_num_seqs=4, dtype=request.param, check=False)


def pair(lm, folder, monkeypatch: pytest.MonkeyPatch):
    """A drafter with a compiled layer, and one with torch's."""
    compiled = loaded(lm, folder)
    monkeypatch.setattr(stacks, "compiles", lambda *_: False)
    monkeypatch.setattr(stacks, "multiplies", lambda *_: False)
    plain = loaded(lm, folder)
    layers = [type(one._sequences.modules[0].head.layers) for one in (compiled, plain)]
    assert layers == [CompiledStack, TorchStack]
    assert compiled.sizes == plain.sizes
    return compiled, plain


def scatter(drafter) -> None:
    """Leave a sequence only blocks that do not lie side by side."""
    pool = drafter._sequences.cache.pool
    blocks = pool.allocate(pool.num_free)
    pool.free(blocks[1::3])


def variants():
    bias = {f"layers.0.self_attn.{name}_proj.bias": n for name, n in zip("qkvo", (HEADS * SIZE, KV_HEADS * SIZE,
            KV_HEADS * SIZE, 32), strict=True)}  # fmt: skip
    mlp = {f"layers.0.mlp.{name}_proj.bias": n for name, n in (("gate", INNER), ("up", INNER), ("down", 32))}
    norms = {f"layers.0.self_attn.{name}_norm.weight": SIZE for name in "qk"}
    yield "plain", {}, {}
    yield "biases", bias | mlp, {"attention_bias": True, "mlp_bias": True}
    yield "qwen3", norms, {"model_type": "qwen3", "head_dim": SIZE}


VARIANTS = {name: (more, keys) for name, more, keys in variants()}


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("form", ["eagle", "modelopt"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_drafts_what_torchs_layer_drafts(lm, form, variant, is_scattered, tmp_path, monkeypatch) -> None:
    more, keys = VARIANTS[variant]
    weights = random_weights(form != "eagle", taps=1, seed=3)
    generator = torch.Generator().manual_seed(1)
    weights |= {name: 0.2 + 0.5 * torch.rand(num, generator=generator) for name, num in more.items()}
    folder = publish(tmp_path / "head", weights, form, (2,), **keys)
    drafters = pair(lm, folder, monkeypatch)
    states = features_of(lm, TEXT, drafters[0].taps)
    known = 0
    for end, tree in ((40, None), (43, "2,2,1"), (44, "dynamic:9"), (60, None)):
        guesses = []
        for one in drafters:
            if is_scattered and not known:
                scatter(one)
            asked = row(TEXT[:end], states[known : end - 1], params=SAMPLED, tree=tree and TreeShape.parse(tree))
            guesses.append(one.propose([asked])[0])
        known = end - 1
        compiled, plain = guesses
        if lm.dtype == torch.float32:
            assert compiled.drafted.tokens == plain.drafted.tokens
            assert plain.q is None or torch.allclose(compiled.q, plain.q, atol=2e-4)
        else:  # a draw may fall on either side; the first distribution has the same text before it
            assert plain.q is None or torch.allclose(compiled.q[0], plain.q[0], atol=0.1)
    held = drafters[0]._sequences.cache.of(0)
    assert isinstance(held.slots, torch.Tensor) == is_scattered
