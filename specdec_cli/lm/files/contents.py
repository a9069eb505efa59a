"""Recognizes folders and GGUF files that hold no causal LM: draft heads, adapters, formats of other programs.

Each is refused by what it is, before its configuration or its tokenizer is read: they would be found missing or
broken, which they are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.draft_formats import published_kinds, recognize

if TYPE_CHECKING:
    from specdec_cli.lm.files.gguf_header import GgufHeader
    from specdec_cli.lm.files.model_folder import ModelFolder

ADAPTER = "adapter_config.json"
POINTER = b"version https://git-lfs.github.com/spec/"
_MOST_POINTER = 256  # bytes; a pointer has about 136, and configurations, which are read once, have more
_SMALL = ("*.json", "*.model", "*.jinja", "*.txt")
_OTHER_FORMATS = {
    "*.onnx": ("an ONNX export", "give the checkpoint that it was exported from"),
    "onnx/*.onnx": ("an ONNX export", "give the checkpoint that it was exported from"),
    "openvino*.xml": ("an OpenVINO export", "give the checkpoint that it was exported from"),
    "mlc-chat-config.json": ("compiled for MLC", "give the original checkpoint"),
    "*.engine": ("a TensorRT-LLM engine", "give the checkpoint that it was built from"),
    "model.bin": ("a CTranslate2 model", "give the checkpoint that it was converted from"),
    "*.nemo": ("a NeMo archive", "give the checkpoint in transformers' format"),
    "*.mlpackage": ("a Core ML export", "give the checkpoint that it was exported from"),
    "tf_model.h5": ("a TensorFlow checkpoint", "convert it to safetensors"),
    "flax_model.msgpack": ("a Flax checkpoint", "convert it to safetensors"),
    "*.tflite": ("a TensorFlow Lite export", "give the checkpoint that it was exported from"),
    "consolidated*.pth": ("Meta's original format", "give the checkpoint in transformers' format"),
    "consolidated*.safetensors": ("Mistral's original format", "give the checkpoint in transformers' format"),
    "*.distcp": ("a distributed training checkpoint", "merge it into safetensors"),
}
"""Files of formats that this engine does not read, what they are and what to do; asked where there are no weights."""
_HEAD_HINT = "name it as the draft of the target that it was made for"
_DRAFT_HINT = "choose a small model of the target's family as the draft, or `--draft ngram`"


def check_contents(model: ModelFolder, has_weights: bool = True) -> None:
    """Refuse a folder that holds something else than a causal LM, by what it is.

    Raises:
        UsageError: it holds something that this engine does not run.
        RunError: its files are git-lfs pointers, or it holds no model at all.
    """
    name, folder = model.name, model.folder
    for pattern in _SMALL:
        for path in sorted(folder.glob(pattern)):
            check_pointer(path)
    if not has_weights or is_adapter(folder):
        return
    try:
        content = model.content
    except RunError:  # the folder may still hold something that is known by its other files
        content = {}
    other_kind = next(_other_kinds(folder, content), None)
    if other_kind is not None:
        what, hint = other_kind
        raise UsageError(f"`{name}` is not supported: it is {what}", hint)
    if not (folder / "config.json").is_file():
        _check_is_model(name, folder)


def check_gguf(name: str, header: GgufHeader) -> None:
    """Refuse a GGUF file that holds something else than a causal LM, by what it is.

    Raises:
        UsageError: it holds something else.
        RunError: it does not say what it holds.
    """
    other_kind = next(_other_ggufs(header), None)
    if other_kind is not None:
        what, hint = other_kind
        raise UsageError(f"`{name}` is not supported: it is {what}", hint)
    if not header.architecture:
        message = f"`{name}` cannot be read as a GGUF file: it names no `general.architecture`"
        raise RunError(message, "copy or download the file again")


def _other_ggufs(header: GgufHeader) -> Iterator[tuple[str, str]]:
    """The kinds of GGUF file other than a causal LM, each with a hint."""
    kind, architecture, names = header.metadata.get("general.type"), header.architecture, header.tensors
    model = "give the model's own GGUF file"
    if kind == "mmproj" or architecture == "clip":
        yield "a projector for images or sound (mmproj)", f"{model}; only text is read"
    if kind == "adapter" or any(name.endswith((".lora_a", ".lora_b")) for name in names):
        hint = "merge it into its base model with llama.cpp's `llama-export-lora`, or give it as a folder of peft"
        yield f"an adapter ({header.metadata.get('adapter.type', 'lora')}) without its base model", hint
    if architecture == "controlvector":
        yield "a control vector", model
    if kind == "imatrix" or any(name.endswith(".in_sum2") for name in names):
        yield "an importance matrix (imatrix), which guides a quantization", model
    if header.draft is not None:
        known = {kind.name: kind.what for kind in published_kinds()}
        what = known.get(header.draft, "an MTP module without its model")
        yield f"{what}, in a GGUF file", "run it with --engine llamacpp, or give its folder with safetensors"
    if header.num_tokens and not names:
        yield "a vocabulary without weights", model


def check_pointer(path: Path) -> None:
    """Refuse a file that only says where git-lfs keeps its content.

    Raises:
        RunError: it is one.
    """
    if path.is_file() and path.stat().st_size < _MOST_POINTER and path.read_bytes().startswith(POINTER):
        raise RunError(f"`{path}` is a git-lfs pointer, not the file itself", "run `git lfs pull` in that folder")


def _other_kinds(folder: Path, content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The kinds of folder other than a causal LM, each with a hint; the most specific first."""
    has_model = has_weights(folder)
    if (folder / "model_index.json").is_file():
        yield "a diffusers pipeline (images or video)", "choose a language model"
    draft = recognize(folder, content)
    if draft is not None and not draft.format.is_model:
        kind = draft.content.get("speculators_model_type")
        of_kind = f" (`speculators_model_type: {kind}`)" if kind is not None else ""
        hint = _HEAD_HINT if draft.format.module else _DRAFT_HINT
        yield f"{draft.format.what or draft.kind.what}, which reads its target's hidden states{of_kind}", hint
    if any((folder / file).is_file() for file in ("config_sentence_transformers.json", "modules.json")):
        yield "a sentence-transformers model, which embeds texts and cannot continue them", "choose a language model"
    for pattern, what_and_hint in _OTHER_FORMATS.items():
        if not has_model and any(folder.glob(pattern)):
            yield what_and_hint


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of a model (peft's format) and no weights of a whole one."""
    return (folder / ADAPTER).is_file() and not has_weights(folder)


def has_weights(folder: Path) -> bool:
    """Whether the folder has weights under the names that transformers reads, pickled ones among them."""
    names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model*.bin")
    return any(any(folder.glob(name)) for name in names)


def _check_is_model(name: str, folder: Path) -> None:
    """Say what is there where there is no configuration.

    Raises:
        RunError: always where the folder holds no model; it returns where weights lie beside nothing.
    """
    inner = next((path.parent for path in sorted(folder.glob("*/config.json"))), None)
    inner = inner or next((path.parent for path in sorted(folder.glob("snapshots/*/config.json"))), None)
    if inner is not None:
        raise RunError(f"`{name}` holds no model itself", f"did you mean `{inner}`?")
    has_tokenizer = any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json", "vocab.json"))
    if (has_tokenizer or any(folder.glob("*.model"))) and not any(folder.glob("*.safetensors")):
        raise RunError(f"`{name}` holds a tokenizer and no model", "give the folder that holds the model's files too")
