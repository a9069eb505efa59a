"""`--quantize int4`: its numbers, a row's bits, text with drafts, planted faults, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from planted import plant
from safetensors.torch import load_file, save_file
from tiny_adapters import make_adapter
from tiny_engine import decode, ngram, self_draft, tiny_lm, tokens
from tiny_gguf import SIZES as GGUF_SIZES
from tiny_gguf import write_gguf
from tiny_models import make_tiny
from tiny_quantized import make_quantized
from transformers import AutoModelForCausalLM
from typed import not_none

from specdec_cli.engine.engine import Engine
from specdec_cli.errors import NotFiniteError, RunError, UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.files.reading import quiet
from specdec_cli.lm.kernels.block_sizes import INT4, INT8
from specdec_cli.lm.llama import native
from specdec_cli.lm.llama.quantized_rows import QuantizedRows
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.load_memory import load_bytes
from specdec_cli.lm.oracle import relative_error
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.lm.self_draft import SelfDraft
from specdec_cli.lm.settings import ModelSettings
from specdec_cli.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="our own decoder does not run here")

TOKENS = [5, 17, 3, 40, 41, 9, 77, 60, 3, 8, 31, 90, 4, 11]
ODD = {"hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 20}


def llama(tmp_path: Path, **sizes: Any) -> str:
    return str(make_tiny("llama", tmp_path / "llama", 3, **{"num_hidden_layers": 3} | sizes))


@pytest.mark.parametrize("num_inputs", [96, 50])
@pytest.mark.parametrize(("type_", "name", "steps"), [(INT4, "Q4_1", 15), (INT8, "Q8_0", 254)])
def test_numbers_are_half_a_step_away_at_most(type_: int, name: str, steps: int, num_inputs: int) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf")
    weight = (
        torch.randn(40, num_inputs, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 2, 40)[:, None]
    )
    weight[3] = 0
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:33]
    rows: Any = QuantizedRows.of("w", "m", weight, type_)[order]
    numbers = rows.reference()
    right = gguf.quants.dequantize(rows._blocks(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(numbers.numpy(), right[:, :num_inputs])
    for place in range(0, num_inputs, 32):
        part = weight[order, place : place + 32]
        span = 2 * part.abs().amax(1) if type_ == INT8 else part.amax(1) - part.amin(1)
        far = (numbers[:, place : place + 32] - part).abs().amax(1)
        assert (far <= span / steps / 2 * 1.001 + part.abs().amax(1) * 2**-10 + 2**-18).all()
    assert rows.are(numbers)
    assert not rows.are(numbers * 1.001)
    moved = QuantizedRows.of("w", "m", weight, type_)[order.roll(1)]
    assert not moved.are(numbers)


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gpt_oss", "bfloat16")])
def test_a_row_has_its_bits_alone_and_in_company(tmp_path: Path, family: str, dtype: str) -> None:
    lm = load_lm(str(make_tiny(family, tmp_path / family, 3, **ODD)), dtype=dtype, quantize="int4")
    assert (lm.decoder, lm.origin.quantize) == ("own, native", "int4")
    whole = lm.score([Row(0, TOKENS, len(TOKENS))])
    for num in (1, 2, 5, 9):
        lm.score([Row(0, TOKENS[:-num], 0)])
        found = lm.score([Row(0, TOKENS, num), Row(1, [*TOKENS[:3], num], 4)])
        assert torch.equal(found[:num], whole[-num:])
        lm.release(0)
        lm.release(1)


@pytest.mark.parametrize("tree", [None, "2,2"])
def test_text_with_a_draft_is_the_plain_one(tmp_path: Path, tree: str | None) -> None:
    target = tiny_lm(tmp_path, "llama", 3, quantize="int4", num_hidden_layers=3)
    params = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
    plain = tokens(decode(target, None, 0, params=params))
    for draft in (ngram(), self_draft(target, "self-exit:1"), load_lm(target.name, quantize="int4")):
        assert tokens(decode(target, draft, 4, params=params, tree=tree)) == plain


def test_a_4_bit_copy_has_the_blocks_of_the_target_loaded_in_4_bits(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    copy, whole = load_lm(folder).self_draft(SelfDraft(quantize="int4")), load_lm(folder, quantize="int4")
    for mine, its in zip(*(lm._forward._layers for lm in (copy, whole)), strict=True):  # type: ignore[attr-defined]
        assert torch.equal(mine.qkv.weight, its.qkv.weight)
        assert torch.equal(mine.mlps[0].down.weight, its.mlps[0].down.weight)


def test_most_guesses_of_a_4_bit_copy_of_the_built_in_target_are_accepted() -> None:
    text, params = "Once upon a time, there was a little rabbit who", SamplingParams(max_new_tokens=64, temperature=0)
    engine = Engine.load("builtin:target", "self-int4", num_speculative_tokens=4)
    target: Any = engine.target
    (output,) = engine.generate([text], params)
    (plain,) = Engine.load("builtin:target", "none").generate([text], params)
    assert output.token_ids == plain.token_ids
    assert not_none(output.speculative.acceptance_rate) > 0.7
    copy: Any = engine.drafter.lm
    assert copy.weight_bytes < target.weight_bytes / 6  # of float32


FAULTS = {
    "another scale": ("(most - least) / 15.0f", "(most - least) / 12.0f"),
    "another minimum": ("half_of_float(least)}", "half_of_float(-least)}"),
    "nibbles in another order": (
        "codes[i] | codes[i + BLOCK_INPUTS / 2] << 4",
        "codes[i] << 4 | codes[i + BLOCK_INPUTS / 2]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*FAULTS])
def test_a_planted_fault_is_caught_at_load(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, FAULTS[fault], "-O0")
    with pytest.raises(RunError, match="other numbers in our decoder than in its file"):
        load_lm(llama(tmp_path), quantize="int4")


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "granite", "qwen3_moe", "gpt_oss"])
def test_facts_and_sizes_are_those_of_the_loaded_model(tmp_path: Path, family: str) -> None:
    folder = str(make_tiny(family, tmp_path / family, 1))
    lm, facts = load_lm(folder, quantize="int4"), describe(folder, quantize="int4")
    assert (lm.weight_bytes, lm.decoder) == (facts.weights_bytes, facts.decoder)
    assert facts.weights_bytes < describe(folder, dtype="float32").weights_bytes / 3
    plan = ModelPlan(folder, ModelSettings(quantize="int4"))
    assert lm.weight_bytes <= load_bytes(plan)
    left = [module for module in lm.model.modules() if hasattr(module, "file_rows") or hasattr(module, "expert_rows")]
    assert not left, "the file is left"


def test_a_model_in_float16_is_quantized_from_its_own_numbers(tmp_path: Path) -> None:
    folder = Path(llama(tmp_path))
    weights = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = (folder / "config.json").read_text().replace("float32", "float16")
    (folder / "config.json").write_text(config)
    lm = load_lm(str(folder), quantize="int4")
    assert lm.dtype == torch.bfloat16
    wide = load_lm(str(folder), quantize="int4", dtype="float32")
    found, right = (one._forward._layers[0].out.weight for one in (lm, wide))  # type: ignore[attr-defined]
    assert torch.equal(found, right)


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("form", ["GGUF", "gptq", "LoRA"])
def test_what_is_not_stored_in_plain_numbers_is_made_plain_first(tmp_path: Path, form: str) -> None:
    """A file in blocks, quantized safetensors and an adapter become the same 4 bits as the numbers that they mean."""
    if form == "gptq":
        stored = make_quantized(form, tmp_path / form)
        plain = stored.parent / "reference"
    else:
        plain = make_tiny("llama", tmp_path / "plain", 3, **GGUF_SIZES)
        if form == "GGUF":
            stored = tmp_path / "stored.gguf"
            save_file(write_gguf(plain, stored, "Q8_0"), plain / "model.safetensors", {"format": "pt"})
        else:
            stored = make_adapter(plain, tmp_path / "adapter")
            with quiet():
                adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(plain), str(stored))
                plain = tmp_path / "merged"
                adapted.merge_and_unload().save_pretrained(plain)
    rows = [Row(0, TOKENS, len(TOKENS))]
    lm, right = (load_lm(str(path), quantize="int4", dtype="float32") for path in (stored, plain))
    assert lm.decoder == "own, native"
    assert relative_error(lm.score(rows), right.score(rows)) < 0.01


def test_what_is_not_computed_in_4_bits_is_refused_by_name(tmp_path: Path) -> None:
    target = llama(tmp_path)
    gpt2 = str(make_tiny("gpt2", tmp_path / "gpt2", 1))
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        (
            target,
            {"decoder": "transformers"},
            "cannot be quantized to int4, which takes our own decoder: it is disabled",
        ),
        (target, {"dtype": "float16"}, "our own decoder: dtype `float16`"),
        (gpt2, {}, "our own decoder: architecture `GPT2LMHeadModel`"),
        (target, {"compute": "native"}, "its weights are not those of a GGUF file"),
    )
    for name, options, reason in cases:
        for refusing in (load_lm, describe):
            with pytest.raises(UsageError, match=reason) as caught:
                refusing(name, quantize="int4", **options)
            assert caught.value.hint
    with pytest.raises(UsageError, match=r"our own decoder: device `cuda`"):
        describe(target, quantize="int4", device="cuda")
    with pytest.raises(UsageError, match=r"`self-int4` cannot copy the weights of .*, which are in blocks"):
        load_lm(target, quantize="int4").self_draft(SelfDraft(quantize="int4"))


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder = Path(llama(tmp_path))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][2, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(NotFiniteError, match=r"`model\.layers\.1\.mlp\.up_proj\.weight` of .* not finite"):
        load_lm(str(folder), quantize="int4", check=False)
