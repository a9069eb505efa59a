"""`doctor` says what the engine does: over every causal type of transformers, and over broken folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from every_type import TYPES, save_tiny
from refused import edit_config
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from typed import not_none
from versions import needs_transformers

from specdec_cli.errors import SpecdecError
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.load import load_lm

SAMPLE = ("dbrx", "deepseek_v32", "diffllama", "gemma3n_text", "gemma4_text", "gpt_bigcode", "mimo_v2_flash", "mllama")
NOT_KNOWN = {"dbrx"}  # its experts are a loop over what the router chose


def both(folder, **options):
    """What the engine and `doctor` make of a folder: facts, or the error's class, message and hint."""
    outcomes: list[Any] = []
    for look in (load_lm, describe):
        try:
            outcomes.append(look(str(folder), **options))
        except SpecdecError as error:
            outcomes.append((type(error), error.message, error.hint))
    return outcomes


def agree(folder, model_type) -> None:
    lm, facts = both(folder)
    if isinstance(lm, tuple) or isinstance(facts, tuple):
        assert lm == facts
        return
    lm.score([Row(0, [3, 4, 5], 1)])
    assert torch.isfinite(lm.score([Row(0, [3, 4, 5, 6, 7], 2), Row(1, [9, 8], 1)])).all()
    if model_type not in NOT_KNOWN:
        assert (facts.kv_bytes_per_token, facts.state_bytes) == (lm.kv_bytes_per_token, lm.state_bytes)
        assert facts.prefix_state_bytes == lm.cache_need(1, 1).prefix_state_bytes
    found = (facts.embedding_size, facts.weights_bytes, facts.max_context)
    assert found == (lm.vocab_size, lm.weight_bytes, lm.max_context)
    assert facts.read_bytes > 0
    assert facts.decoder.startswith(lm.decoder)


@pytest.mark.in_turn(1, every=8)
@pytest.mark.parametrize("model_type", SAMPLE)
def test_point_18_doctor_says_what_the_engine_does(model_type, tmp_path: Path) -> None:
    agree(save_tiny(model_type, tmp_path), model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [one for one in TYPES if one not in SAMPLE])
def test_point_18_doctor_says_what_the_engine_does_for_every_type(model_type, tmp_path: Path) -> None:
    agree(save_tiny(model_type, tmp_path), model_type)


@needs_transformers("reads Gemma 4's keys itself")
def test_layers_that_share_keys_run_and_keep_no_own_ones(tmp_path: Path) -> None:
    """Gemma 4 E2B: keys of some layers are those of earlier ones, and inputs would be cut before them."""
    layers = ["sliding_attention", "full_attention"] * 3
    shape = {"num_hidden_layers": 6, "layer_types": layers, "head_dim": 8, "global_head_dim": 16}
    whole, shared = (
        describe(str(save_tiny("gemma4_text", tmp_path / str(n), num_kv_shared_layers=n, **shape))) for n in (0, 2)
    )
    assert not_none(shared.kv_bytes_per_token) < not_none(whole.kv_bytes_per_token)
    agree(tmp_path / "2", "gemma4_text")


def test_granite_with_attention_in_every_layer_runs(tmp_path: Path) -> None:
    agree(save_tiny("granitemoehybrid", tmp_path, layer_types=["attention"] * 4), "granitemoehybrid")
    assert not isinstance(both(tmp_path)[0], tuple)


def test_nothing_is_read_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny("mixtral", tmp_path)
    size = (folder / "model.safetensors").stat().st_size
    header = 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    with (folder / "model.safetensors").open("r+b") as file:  # a hole instead of numbers
        file.truncate(header)
        file.truncate(size)
    assert describe(str(folder)).kv_bytes_per_token == 2 * 2 * 2 * 8 * 4


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_dtypes_and_int8(tmp_path: Path, family: str, dtype: str, quantize: str) -> None:
    lm, facts = both(make_tiny(family, tmp_path), dtype=dtype, quantize=quantize)
    assert (lm.weight_bytes, lm.kv_bytes_per_token) == (facts.weights_bytes, facts.kv_bytes_per_token)


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "int8"])
def test_a_dtype_that_the_engine_does_not_compute_in(tmp_path: Path, dtype: str) -> None:
    folder = make_tiny("llama", tmp_path)
    edit_config(folder, dtype=dtype)
    lm, facts = both(folder)
    assert lm == facts
    assert f"is in `{dtype}`" in facts[1]
    assert describe(str(folder), dtype="bfloat16").dtype == "bfloat16"


def test_a_model_is_described_in_inference_mode_too(tmp_path: Path) -> None:
    folder = str(make_tiny("llama", tmp_path))
    expected = describe(folder).weights_bytes
    with torch.inference_mode():
        assert describe(folder).weights_bytes == expected


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("is_copy", [True, False])
def test_files_that_hold_both_of_two_tied_weights(tmp_path: Path, family: str, dtype: str, is_copy: bool) -> None:
    folder = make_tiny(family, tmp_path, tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    embedding = next(name for name in weights if name.endswith(("embed_tokens.weight", "wte.weight")))
    if is_copy:
        weights["lm_head.weight"] = weights[embedding].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    lm, facts = both(folder, dtype=dtype)
    assert facts.weights_bytes == lm.weight_bytes
    assert facts.kv_bytes_per_token == lm.kv_bytes_per_token


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_link_to_nothing_is_called_that(tmp_path: Path, file: str) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    (folder / file).unlink()
    (folder / file).symlink_to("../../blobs/0123")
    (tmp_path / "away").symlink_to("nowhere")
    for name, link in ((folder, folder / file), (tmp_path / "away", tmp_path / "away")):
        engine, doctor = both(name)
        assert engine[1] == f"`{link}` is a link to `{link.readlink()}`, which does not exist"
        assert doctor == engine or file == "model.safetensors"


@needs_transformers("does not read such a file")
def test_architectures_written_as_a_text(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for given, said in (("LlamaForCausalLM", None), ("LlamaModel", "is a `LlamaModel`, not a causal LM")):
        (folder / "config.json").write_text(json.dumps(config | {"architectures": given}))
        for found in both(folder):
            assert isinstance(found, tuple) == (said is not None)
            assert said is None or said in found[1]
