"""Our own decoder's families: each beside transformers' forward, with the same bits in any company, and faults in each.

Norms, biases and sinks are random too, texts outgrow the windows, and a mixture's rows take different experts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import plant
from test_lm_llama import TEXT, one_by_one, score
from tiny_engine import PROMPTS, decode, tokens
from tiny_models import make_tiny
from typed import not_none, stand_in

from specdec_cli.drafted import Drafted
from specdec_cli.lm.door import Row
from specdec_cli.lm.llama import families, llama, llama_weights
from specdec_cli.lm.llama.caller import Rotations
from specdec_cli.lm.load import load_lm
from specdec_cli.recipe.values import Quantize
from specdec_cli.sampling.params import SamplingParams

PARTLY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"head_dim": 40}),
    "ministral": ("ministral", {}),
    "qwen2, sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "phi3": ("phi3", {"sliding_window": 7}),
    "phi3, partial rotary": ("phi3", {"rope_parameters": PARTLY}),
    "phi3, long rope": ("phi3_long", {}),
    "smollm3": ("smollm3", {"use_sliding_window": True, "sliding_window": 9}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3": ("olmo3", {}),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"final_logit_softcapping": 5.0, "head_dim": 40}),
    "granite": ("granite", {}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False}),
    "olmoe": ("olmoe", {}),
    "gpt_oss": ("gpt_oss", {"num_attention_heads": 8, "head_dim": 24}),
}
PRECISIONS = [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")]


def made(case: str, folder: Path) -> str:
    family, shape = FAMILIES[case]
    return str(make_tiny(family, folder, seed=3, vectors=0.3, **stand_in(shape)))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return made(request.param, tmp_path_factory.mktemp("model"))


def test_float32_logits_and_tokens_are_those_of_transformers(folder: str) -> None:
    own, theirs = load_lm(folder), load_lm(folder, decoder="transformers")
    assert own.decoder_obstacle is None
    assert own.kv_bytes_per_token == theirs.kv_bytes_per_token
    assert torch.allclose(score(own), score(theirs), atol=2e-4, rtol=1e-4)
    params = SamplingParams(max_new_tokens=24)
    expected = tokens(decode(theirs, None, 0, params=params))
    assert len({token for one in expected for token in one}) > 4
    assert tokens(decode(own, None, 0, params=params)) == expected
    assert tokens(decode(own, load_lm(folder), 4, params=params)) == expected
    assert tokens(decode(own, "ngram", 3, PROMPTS[:1], params)) == expected[:1]


@pytest.mark.in_turn(3, every=8)
@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("folder", [*FAMILIES], indirect=True)
def test_bfloat16_is_as_close_to_float32_as_transformers(folder: str, quantize: Quantize) -> None:
    """The median position's error: a mixture's rows lose more where one takes another expert."""
    exact = score(load_lm(folder))
    own, theirs = (
        (score(load_lm(folder, dtype="bfloat16", quantize=quantize, decoder=decoder, check=False)) - exact).square()
        for decoder in ("auto", "transformers")
    )
    assert own.mean(1).median() <= (1.5 if quantize == "none" else 2.5) * theirs.mean(1).median()


@pytest.mark.in_turn(5, every=7)
@pytest.mark.parametrize(
    ("folder", "dtype", "quantize"),
    [(family, *how) for family in FAMILIES for how in PRECISIONS],
    indirect=["folder"],
)
def test_a_row_has_the_same_bits_in_any_company(folder: str, dtype: str, quantize: Quantize) -> None:
    """Alone, verified, in chunks, in a batch, on a shared prefix, as a tree's node, and guessed."""
    lm = load_lm(folder, dtype=dtype, quantize=quantize, block_size=4)
    before = torch.get_num_threads()
    text = TEXT[: lm._short_context or 60]  # what is beyond long rope's threshold is read anew
    whole = lm.score([Row(0, text, len(text))])
    try:
        for num_rows, num_threads in ((1, 1), (2, 2), (3, 3), (5, 1), (7, 4), (12, 2), (20, 3)):
            torch.set_num_threads(num_threads)
            lm.release(0)
            lm.score([Row(0, text[: len(text) - num_rows], 0)])
            company = Row(1, [*TEXT[:9], *TEXT[: 3 + num_rows]], 1)
            found = lm.score([Row(0, text, num_rows), company])
            assert torch.equal(found[:num_rows], whole[-num_rows:])
            lm.release(1)
    finally:
        torch.set_num_threads(before)
    lm.release(0)
    assert lm.adopt(2, text, "salt") == 0
    lm.score([Row(2, text[:13], 0)])
    assert torch.equal(lm.score([Row(2, text, 5)]), whole[-5:])
    assert lm.adopt(3, text, "salt") > 8
    assert torch.equal(lm.score([Row(3, text, 3)]), whole[-3:])
    check_tree(lm, text[:-4])
    guess = not_none(lm.guess([Row(5, text[:-6], 6), Row(6, text[:4], 3)], 97)).tokens
    assert guess == [one_by_one(lm, Row(7, text[:-6], 6), 97), one_by_one(lm, Row(8, text[:4], 3), 97)]
    lm.check_integrity()


def check_tree(lm: Any, text: list[int]) -> None:
    """Nodes have the bits of their paths as texts."""
    tree = Drafted((5, 6, 7, 8, 9), (-1, -1, 0, 2, 1))
    found = lm.score([Row(9, text, 6, tree)])
    for node in range(-1, 5):
        assert torch.equal(found[node + 1], lm.score([Row(10, [*text, *tree.tokens_to(node)], 1)])[0])
        lm.release(10)
    lm.release(9)


def test_long_rope_is_read_anew_beyond_its_threshold(tmp_path: Path) -> None:
    """Guesses up to 24 tokens are made in one call; beyond, the draft scores token by token."""
    folder = made("phi3, long rope", tmp_path)
    own, theirs = load_lm(folder), load_lm(folder, decoder="transformers")
    assert not_none(own.guess([Row(0, TEXT[:20], 5)], 97)).tokens == [one_by_one(theirs, Row(0, TEXT[:20], 5), 97)]
    assert own.guess([Row(0, TEXT[:21], 5)], 97) is None
    own.release(0)
    theirs.release(0)
    for length in range(20, 30):
        rows = [Row(0, TEXT[:length], 4), Row(1, TEXT[5:20], 2)]
        assert torch.allclose(own.score(rows), theirs.score(rows), atol=2e-4, rtol=1e-4)
        tree = Row(2, TEXT[: length - 3], 6, Drafted((5, 6, 7, 8, 9), (-1, -1, 0, 2, 1)))
        assert torch.allclose(own.score([tree]), theirs.score([tree]), atol=2e-4, rtol=1e-4)
    for handle in range(3):
        own.release(handle)
    params = SamplingParams(max_new_tokens=40)
    expected = tokens(decode(own, None, 0, PROMPTS[:2], params))
    assert tokens(decode(own, load_lm(folder), 4, PROMPTS[:2], params)) == expected


def family_fault(**changed: Any) -> Any:
    """A family that is described wrongly."""

    def put(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(llama, "family_of", lambda model: replace(families.family_of(model), **changed))

    return put


def of_layer(fault: Any) -> Any:
    """A fault in what is taken of a layer."""

    def put(monkeypatch: pytest.MonkeyPatch) -> None:
        right = llama_weights.Taking.layer
        monkeypatch.setattr(llama_weights.Taking, "layer", lambda *given: fault(right(*given)))

    return put


def of_model(**fields: Any) -> Any:
    """A fault in what the compiled half is told of the model."""

    def put(monkeypatch: pytest.MonkeyPatch) -> None:
        right = llama.LlamaDecoder._model_fields

        def wrong(*given: Any) -> Any:
            found = right(*given)
            for name, value in fields.items():
                setattr(found, name, value)
            return found

        monkeypatch.setattr(llama.LlamaDecoder, "_model_fields", wrong)

    return put


def local_turns_as_global(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rotations, "of_layer", lambda self, layer_type: self.types.index("full_attention"))


def norms_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(layer: Any) -> Any:
        behind = {"output_norm": None, "down_norm": None}
        return replace(layer, input_norm=layer.output_norm, mlp_norm=layer.down_norm, **behind)

    of_layer(fault)(monkeypatch)


FAULTS: dict[str, tuple[str, Any]] = {
    "window one longer": ("mistral", of_layer(lambda layer: replace(layer, window=layer.window + 1))),
    "window one shorter": ("gpt_oss", of_layer(lambda layer: replace(layer, window=layer.window - 1))),
    "window on a global layer": ("gemma3", family_fault(windows="all")),
    "global rotation on a local layer": ("gemma3", local_turns_as_global),
    "rotation where there is none": ("smollm3", of_layer(lambda layer: replace(layer, rotation=0))),
    "norms before instead of behind": ("olmo2", norms_before),
    "norms over each head": ("olmo3", family_fault(norms_whole_width=False)),
    "weight without one": ("gemma", family_fault(adds_one=False)),
    "scores not capped": ("gemma2", family_fault(caps_scores=False)),
    "no multipliers": ("granite", family_fault(has_multipliers=False)),
    "no sinks": ("gpt_oss", of_layer(lambda layer: replace(layer, sinks=None))),
    "shares of all experts": ("mixtral", of_model(shares_sum_to_one=False)),
    "one expert too few": ("qwen3_moe", of_model(num_taken=1)),
    "experts in another order": ("mixtral", of_layer(lambda layer: replace(layer, mlps=layer.mlps[::-1]))),
    "no limits": ("gpt_oss", of_model(steepness=1.0)),
    "logits not capped": ("gemma3", of_model(logit_cap=0.0)),
}


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, put = FAULTS[fault]
    folder = made(case, tmp_path)
    right = score(load_lm(folder, decoder="transformers"))
    assert torch.allclose(score(load_lm(folder, check=False)), right, atol=2e-4, rtol=1e-4)
    put(monkeypatch)
    assert not torch.allclose(score(load_lm(folder, check=False)), right, atol=1e-2)


@pytest.mark.slow
def test_49_1_a_row_that_follows_its_company_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that begins where that of the first of the rows beside it does, on every processor."""
    plant(monkeypatch, "a window begins with its company", "-O0")
    with pytest.raises(AssertionError):
        test_a_row_has_the_same_bits_in_any_company(made("mistral", tmp_path), "float32", "none")
