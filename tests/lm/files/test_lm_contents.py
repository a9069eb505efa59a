"""Folders that hold no causal LM, or a broken one: what they are, in the same words from the engine and `doctor`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import refused
import torch
from refused import edit_config, edit_weights
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.facts import describe
from specdec_cli.lm.load import load_lm, load_tokenizer

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4665a5\nsize 4970840\n"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory):
    return make_tiny("llama", tmp_path_factory.mktemp("sound"))


@pytest.fixture
def folder(sound, tmp_path: Path):
    return shutil.copytree(sound, tmp_path / "model")


def refusal(folder, *, tokenizer_too: bool = False):
    """The one error that loading and `doctor` both raise; with `tokenizer_too` its tokenizer's as well."""
    more = (load_tokenizer,) if tokenizer_too else ()
    said = refused.refusal(folder, load_lm, describe, *more)
    assert said.hint is not None
    assert "download the model again" not in said.hint
    assert "belong together" not in said.hint
    return type(said), said.message, said.hint


def write(path, content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model_index.json", {"_class_name": "StableDiffusionPipeline"}, "a diffusers pipeline"),
        ("model.onnx", "", "an ONNX export"),
        ("onnx/model.onnx", "", "an ONNX export"),
        ("openvino_model.xml", "<net/>", "an OpenVINO export"),
        ("rank0.engine", "", "a TensorRT-LLM engine"),
        ("tf_model.h5", "", "a TensorFlow checkpoint"),
        ("consolidated.00.pth", "", "Meta's original format"),
        ("consolidated.safetensors", "", "Mistral's original format"),
        ("mlc-chat-config.json", {}, "compiled for MLC"),
        ("model.bin", "", "a CTranslate2 model"),
    ],
)
@pytest.mark.parametrize("has_config", [False, True])
def test_point_19_another_format_is_named(folder, has_config: bool, file: str, content, said: str) -> None:
    (folder / "model.safetensors").unlink()
    if not has_config:
        (folder / "config.json").unlink()
    write(folder / file, content)
    kind, message, _ = refusal(folder, tokenizer_too=True)
    assert kind is UsageError
    assert f"is {said}" in message
    assert "is not supported" in message


@pytest.mark.parametrize("file", ["modules.json", "config_sentence_transformers.json"])
def test_point_19_a_sentence_transformer_is_named(folder, file: str) -> None:
    write(folder / file, [])
    assert "is a sentence-transformers model" in refusal(folder)[1]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "an EAGLE draft head"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "an EAGLE draft head"),
        ({"model_type": "eagle"}, "an EAGLE draft head"),
        ({"speculators_model_type": "eagle3", "model_type": "llama"}, "an EAGLE draft head"),
        ({"speculators_config": {}}, "a draft of the speculators library"),
        ({"architectures": ["Eagle3Speculator"]}, "an EAGLE draft head"),
        ({"architectures": ["MedusaModel"]}, "a set of Medusa heads"),
        ({"medusa_num_heads": 4, "model_type": None}, "a set of Medusa heads"),
        ({"model_type": "mlp_speculator"}, "an MLP speculator"),
        ({"architectures": ["DFlashDraftModel"]}, "a DFlash draft"),
        ({"architectures": ["Qwen3DSparkModel"]}, "a DSpark draft"),
        ({"architectures": ["DFlash2BeamDraftModel"]}, "a DFlash2 draft"),
    ],
)
def test_point_19_a_draft_head_is_named_by_its_configuration(folder, config, said: str) -> None:
    edit_config(folder, **config)
    kind, message, hint = refusal(folder, tokenizer_too=True)
    assert kind is UsageError
    assert said in message
    assert (
        "name it as the draft"
        if any(name in said for name in ("EAGLE", "DFlash", "DSpark", "Medusa"))
        else "--draft ngram"
    ) in hint


@pytest.mark.parametrize("names", [("fc.weight",), ("midlayer.self_attn.q_proj.weight",), ("d2t",)])
def test_point_8_an_eagle_head_that_calls_itself_a_llama_is_named_by_its_tensors(folder, names) -> None:
    edit_weights(folder, lambda weights: weights.update({name: torch.zeros(2, 4) for name in names}))
    assert "is an EAGLE draft head" in refusal(folder, tokenizer_too=True)[1]


def test_a_pickled_eagle_head_is_named_and_not_unpickled(folder) -> None:
    weights = load_file(folder / "model.safetensors") | {"fc.weight": torch.zeros(32, 64)}
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert "is an EAGLE draft head" in refusal(folder, tokenizer_too=True)[1]
    del weights["fc.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    assert load_lm(str(folder)).decoder == "own"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization": {"bits": 3, "group_size": 64}}, "quantized by `mlx` with `bits: 3`"),
        ({"quantization": (mlx := {"bits": 6, "group_size": 32}), "quantization_config": mlx}, "quantized by `mlx`"),
        ({"quantization": {"bits": 4, "group_size": 64, "lm_head": {"bits": 8}}}, "with `lm_head: {'bits': 8}`"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}},
            "quantized by `modelopt` with `quant_algo: W4A8_AWQ`",
        ),
        (
            {"quantization_config": {"quant_algo": "MXFP6", "producer": {"name": "modelopt"}}},
            "quantized by `modelopt` with `quant_algo: MXFP6`",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized"}},
            "quantized by `compressed-tensors` with `format: mxfp6-pack-quantized`",
        ),
    ],
)
def test_point_19_a_quantized_form_of_another_program_is_named(folder, changes, said: str) -> None:
    edit_config(folder, **changes)
    assert said in refusal(folder)[1]


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors", "tokenizer.model"])
def test_point_8_a_git_lfs_pointer_is_named(folder, file: str) -> None:
    write(folder / file, POINTER)
    kind, message, hint = refusal(folder, tokenizer_too=file != "model.safetensors")
    assert kind is RunError
    assert f"{file}` is a git-lfs pointer" in message
    assert "git lfs pull" in hint


def test_point_8_a_pointer_in_the_place_of_a_shard_is_named(folder) -> None:
    shard(folder)
    write(folder / "model-00002-of-00002.safetensors", POINTER)
    assert "model-00002-of-00002.safetensors` is a git-lfs pointer" in refusal(folder)[1]


def shard(folder) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, its in files.items():
        save_file({name: weights[name] for name in its}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, its in files.items() for name in its}
    write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def whole_error(folder):
    """As `refusal`, for files that must be copied again."""
    said = []
    for look in (load_lm, describe):
        with pytest.raises(RunError) as caught:
            look(str(folder))
        said.append(caught.value.message)
    assert said[0] == said[1]
    return said[0]


def test_point_8_shards_that_are_not_there(folder) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "lacks the weights file `model-00002-of-00002.safetensors`" in whole_error(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert "no `model.safetensors.index.json`" in whole_error(folder)


def test_point_8_a_truncated_file(folder) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for size in (len(content) - 5, 40, 4, 0):
        path.write_bytes(content[:size])
        assert "is not a whole safetensors file" in whole_error(folder)


def test_point_8_tensors_that_do_not_fit_the_configuration(folder) -> None:
    edit_config(folder, num_hidden_layers=3)
    assert "`model.layers.2.input_layernorm.weight` is missing" in whole_error(folder)
    edit_config(folder, num_hidden_layers=2, hidden_size=64)
    assert "has another shape" in whole_error(folder)
    edit_config(folder, hidden_size=32, vocab_size=98)
    assert "has another shape" in whole_error(folder)


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"])
def test_point_8_a_missing_tensor(folder, name: str) -> None:
    edit_weights(folder, lambda weights: weights.pop(name))
    assert f"`{name}` is missing" in whole_error(folder)


def test_point_8_a_missing_tensor_of_a_shard(folder) -> None:
    shard(folder)
    file = folder / "model-00001-of-00002.safetensors"
    weights = load_file(file)
    name = sorted(weights)[0]
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    assert f"`{name}` is missing" in whole_error(folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"weight_map": {"a": "model-00001-of-00002.safetensors"}}, "has no `metadata`"),
        ({"metadata": {}}, "has no `weight_map`"),
        ({"metadata": {}, "weight_map": {}}, "names no files"),
        ({"metadata": {}, "weight_map": {"a": 1}}, "names no files"),
        ({"metadata": {}, "weight_map": {"a": "../m.safetensors"}}, "not a file beside it"),
        ([], "it holds no JSON object"),
    ],
)
def test_point_8_an_index_that_names_no_files_beside_it(folder, content, said: str) -> None:
    shard(folder)
    write(folder / "model.safetensors.index.json", content)
    assert said in whole_error(folder)


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "max_position_embeddings"])
def test_point_8_a_size_that_no_model_has(folder, key: str) -> None:
    edit_config(folder, **{key: 0})
    assert f"`{key}: 0`" in whole_error(folder)


def test_pickled_weights_beside_an_export_are_pickled_weights(folder) -> None:
    (folder / "model.safetensors").unlink()
    write(folder / "onnx" / "model.onnx", "")
    for content in ("", "PK\x03\x04"):
        write(folder / "pytorch_model.bin", content)
        assert "pytorch_model.bin` " in refusal(folder)[1]


def test_a_vision_language_model_of_the_name_eagle_is_no_draft_head(folder) -> None:
    edit_config(folder, architectures=["Eagle2_5_VLForConditionalGeneration"], model_type="eagle_x", vision_config={})
    with pytest.raises(UsageError, match="architecture `eagle_x`"):
        describe(str(folder))


def test_an_adapter_beside_a_whole_model_is_the_model(folder) -> None:
    write(folder / "generation_config.json", {})
    (folder / "adapters").mkdir()
    write(folder / "adapters" / "adapter_config.json", {"peft_type": "LORA"})
    assert describe(str(folder)).architecture == "llama"


def test_a_tokenizer_without_a_model(tmp_path: Path) -> None:
    write(tmp_path / "tokenizer.json", "{}")
    assert "holds a tokenizer and no model" in refusal(tmp_path, tokenizer_too=True)[1]


def test_a_folder_around_the_model(folder) -> None:
    kind, message, hint = refusal(folder.parent, tokenizer_too=True)
    assert kind is RunError
    assert "holds no model itself" in message
    assert str(folder) in hint


def test_weights_of_another_name(folder) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert "only `weights.safetensors`" in refusal(folder)[1]


@pytest.mark.parametrize("file", ["modules.json", "model_index.json"])
def test_a_folder_whose_files_are_broken_still_gets_one_sentence(folder, file: str) -> None:
    (folder / "model.safetensors").unlink()
    write(folder / file, "[1, 2")
    write(folder / "config.json", "[]")
    assert refusal(folder)[1]


def as_entries(parts: Any, **entries: str) -> None:
    for key, value in entries.items():
        parts.set(key.replace("__", "."), value, 8)


def only_mtp(parts: Any) -> None:
    parts.tensors = [tensor for tensor in parts.tensors if not tensor.name.startswith("blk.0.")]
    parts.tensors[0].name = "blk.1.nextn.eh_proj.weight"


def dflash_with(tensor: str) -> Callable[[Any], object]:
    """A draft of DFlash's architecture that has a tensor of another kind."""

    def change(parts: Any) -> None:
        as_entries(parts, general__architecture="dflash")
        parts.tensors[0].name = tensor

    return change


OTHER_GGUFS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a projector": (lambda parts: as_entries(parts, general__architecture="clip"), "a projector for images or sound"),
    "a projector by type": (lambda parts: as_entries(parts, general__type="mmproj"), "a projector for images or sound"),
    "an adapter": (
        lambda parts: as_entries(parts, general__type="adapter", adapter__type="lora"),
        "an adapter (lora) without its base model",
    ),
    "an adapter by its tensors": (
        lambda parts: setattr(parts.tensors[0], "name", "blk.0.attn_q.weight.lora_a"),
        "an adapter (lora) without its base model",
    ),
    "a control vector": (lambda parts: as_entries(parts, general__architecture="controlvector"), "a control vector"),
    "an importance matrix": (
        lambda parts: (as_entries(parts, general__type="imatrix"), parts.entries.pop("general.architecture")),
        "an importance matrix (imatrix)",
    ),
    "EAGLE-3": (lambda parts: as_entries(parts, general__architecture="eagle3"), "an EAGLE-3 head, in a GGUF file"),
    "DFlash": (lambda parts: as_entries(parts, general__architecture="dflash"), "a DFlash draft, in a GGUF file"),
    "DFlash2": (dflash_with("selector_hidden.weight"), "a DFlash2 draft, in a GGUF file"),
    "DSpark": (dflash_with("markov_w1.weight"), "a DSpark draft, in a GGUF file"),
    "an assistant": (
        lambda parts: as_entries(parts, general__architecture="gemma4-assistant"),
        "an MTP module without its model, in a GGUF file",
    ),
    "an MTP module": (only_mtp, "an MTP module without its model, in a GGUF file"),
    "a vocabulary": (lambda parts: parts.tensors.clear(), "a vocabulary without weights"),
}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf", reason="needs gguf")
    from tiny_gguf import SIZES, write_gguf

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(make_tiny("llama", path.parent / "source", **SIZES, num_hidden_layers=2), path, "Q4_0")
    return path


@pytest.mark.parametrize("kind", OTHER_GGUFS)
def test_51_a_gguf_file_that_is_no_model_is_named(gguf: Path, tmp_path: Path, kind: str) -> None:
    from gguf_parts import Parts

    change, what = OTHER_GGUFS[kind]
    parts = Parts.of(gguf)
    change(parts)
    error = refused.refusal(parts.write(tmp_path / "other.gguf"), load_lm, describe, load_tokenizer)
    assert isinstance(error, UsageError)
    assert f"is not supported: it is {what}" in error.message
