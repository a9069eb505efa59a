"""Drafts made of a target's weights: the numbers of models that are loaded as such, in memory that is counted."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from shortened import mostly_slow
from tiny_hybrids import HYBRIDS, save_hybrid
from tiny_models import FAMILIES, make_tiny
from typed import stand_in

from specdec_cli.errors import UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.first_layers import first_layers
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.self_draft import SelfDraft
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.measure.audit.table import TableLM

INT8, INT4 = SelfDraft(quantize="int8"), SelfDraft(quantize="int4")
TEXT = [(7 * i * i + 3 * i) % 89 + 2 for i in range(29)]


def logits(lm: TransformersLM) -> torch.Tensor:
    found = lm.score([Row(0, TEXT, len(TEXT))])
    lm.release(0)
    return found


def made(target: TransformersLM, draft: SelfDraft) -> TransformersLM:
    lm = target.self_draft(draft)
    lm.hold(8)
    return lm


def first_layers_saved(folder: Path, num_layers: int) -> Path:
    """The checkpoint with its first layers alone, as files of its own."""
    shorter = folder.with_name(f"{folder.name}-{num_layers}")
    shutil.copytree(folder, shorter)
    config = json.loads((shorter / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    (shorter / "config.json").write_text(json.dumps(config))
    tensors = load_file(shorter / "model.safetensors")
    gone = tuple(f"{prefix}.{i}." for prefix in ("layers", "h") for i in range(num_layers, 9))
    kept = {name: tensor for name, tensor in tensors.items() if not any(f".{one}" in name for one in gone)}
    save_file(kept, shorter / "model.safetensors", {"format": "pt"})
    return shorter


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "mixtral", "granite"])
def test_an_int8_copy_computes_as_the_target_loaded_in_int8(family: str, dtype: str, tmp_path: Path) -> None:
    folder = str(make_tiny(family, tmp_path / family, 1))
    target, right = load_lm(folder, dtype=dtype), load_lm(folder, dtype=dtype, quantize="int8")
    if target.decoder != "own":
        pytest.skip("our own decoder does not run here")
    before = logits(target)
    draft = made(target, INT8)
    assert torch.equal(logits(draft), logits(right))
    assert torch.equal(logits(target), before)
    assert [(w.name, w.num_bytes) for w in draft.weights] == [(w.name, w.num_bytes) for w in right.weights]
    assert draft.traffic == right.traffic
    new = [w for w in right.weights if (w.name, w.num_bytes) not in {(v.name, v.num_bytes) for v in target.weights}]
    assert 0 < draft.weight_bytes == sum(w.num_bytes for w in new) < right.weight_bytes, "what it shares is not counted"
    assert draft.origin.computes_as(right.origin)
    assert not draft.origin.computes_as(target.origin)


@pytest.mark.in_turn(0, every=5)
@pytest.mark.parametrize("decoder", ["auto", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family", mostly_slow(FAMILIES, ("llama", "gemma3_text", "mixtral", "gpt2", "gpt_neox", "falcon"))
)
def test_the_first_layers_compute_as_a_model_of_these(family: str, dtype: str, decoder: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / family, 1)
    target = load_lm(str(folder), dtype=dtype, decoder=decoder)
    right = load_lm(str(first_layers_saved(folder, 1)), dtype=dtype, decoder=decoder)
    before = logits(target)
    draft = made(target, SelfDraft(layers=1))
    assert draft.decoder == target.decoder
    assert torch.equal(logits(draft), logits(right))
    assert torch.equal(logits(target), before)
    assert draft.kv_bytes_per_token == right.kv_bytes_per_token
    assert draft.weight_bytes == 0, "it adds none"
    assert draft.num_bytes == 8 * draft.block_size * draft.kv_bytes_per_token
    assert draft.num_parameters == right.num_parameters
    assert draft.traffic == right.traffic
    assert not draft.origin.computes_as(target.origin)


def test_first_layers_of_an_int8_target_are_int8(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama", 1)
    target = load_lm(str(folder), quantize="int8")
    right = load_lm(str(first_layers_saved(folder, 1)), quantize="int8")
    assert torch.equal(logits(made(target, SelfDraft(layers=1))), logits(right))


@pytest.mark.parametrize("family", mostly_slow(HYBRIDS, ("qwen3_5_text",)))
def test_a_hybrids_first_layers_run_too(family: str, tmp_path: Path) -> None:
    target = load_lm(str(save_hybrid(family, tmp_path)))
    before = logits(target)
    draft = made(target, SelfDraft(layers=1))
    first = logits(draft)
    assert first.isfinite().all()
    assert torch.equal(logits(draft), first)
    assert torch.equal(logits(target), before)


def test_refusals_are_one_sentence(tmp_path: Path) -> None:
    folder = str(make_tiny("llama", tmp_path / "llama", 1))
    target, slow, packed = load_lm(folder), load_lm(folder, decoder="transformers"), load_lm(folder, quantize="int8")
    assert packed.kind == "int8"
    for lm, draft, words in (
        (target, SelfDraft(layers=2), "drafts with 2 layers, and .* has 2"),
        (slow, INT8, "runs in transformers' forward pass"),
        (packed, INT8, "quantized already"),
        (TableLM.random(8), INT8, "`self-int8` is made of the target's weights, and `table` has none"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            lm.self_draft(draft)
        assert caught.value.hint


@pytest.mark.in_turn(0, every=4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "granite", "mixtral", "gpt2"])
def test_facts_are_those_of_the_loaded_draft(family: str, dtype: str, tmp_path: Path) -> None:
    """Granite's embedding is tied, Mixtral has experts, and GPT-2 runs in transformers' forward pass."""
    folder = str(make_tiny(family, tmp_path / family, 1))
    target = load_lm(folder, dtype=dtype)
    for draft in (SelfDraft(layers=1), INT8, INT4):
        if draft.quantize != "none" and target.decoder != "own":
            with pytest.raises(UsageError, match="runs in transformers' forward pass"):
                describe(folder, dtype=dtype, self_draft=draft)
            continue
        facts, lm = describe(folder, dtype=dtype, self_draft=draft), made(target, draft)
        assert facts.name == lm.name == draft.spec
        assert facts.weights_bytes == lm.weight_bytes
        assert facts.kv_bytes_per_token == lm.kv_bytes_per_token
        assert target.decoder != "own" or facts.decoder == lm.decoder == ("own, native" if draft is INT4 else "own")
        assert facts.read_bytes == int(lm.traffic.bytes_moved(1, 0))
    with pytest.raises(UsageError, match="has 2"):
        describe(folder, self_draft=SelfDraft(layers=2))


def test_a_model_without_a_list_of_layers_is_refused_in_words() -> None:
    class Strange:
        config = stand_in(SimpleNamespace(model_type="strange"))

        def get_decoder(self) -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(2, 2))

    with pytest.raises(UsageError, match="`strange` model stand in no list"):
        first_layers(Strange(), 1)
