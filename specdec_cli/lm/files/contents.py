"""Recognizes folders that are not checkpoints of a causal LM: draft heads, formats of other programs.

Each is refused by what it is, before its configuration or its tokenizer is read: they would be found missing or
broken, which they are not.
"""

from __future__ import annotations

import json
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from specdec_cli.errors import RunError, UsageError

ADAPTER = "adapter_config.json"
POINTER = b"version https://git-lfs.github.com/spec/"
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
_HEADS = {
    "eagle": "an EAGLE draft head, which reads its target's hidden states",
    "medusa": "a set of Medusa heads, which read their target's hidden states",
    "hydra": "a set of Hydra heads, which read their target's hidden states",
    "dflash": "a DFlash draft, which reads its target's hidden states",
    "dspark": "a DSpark draft, which reads its target's hidden states",
    "mlp_speculator": "an MLP speculator, which reads its target's hidden states",
    "mlpspeculator": "an MLP speculator, which reads its target's hidden states",
    "speculator": "a draft of the speculators library, which reads its target's hidden states",
}
"""Drafts that are no language models of their own, by a word in what their configuration calls them."""
_HEAD_TENSORS = {
    "midlayer.": "eagle", "d2t": "eagle", "t2d": "eagle", "medusa_head": "medusa", "medusa_heads": "medusa",
}  # fmt: skip
_RUN = ("eagle", "dflash", "dspark", "medusa")
_HEAD_HINT = "name it as the draft of the target that it was made for"
_DRAFT_HINT = "choose a small model of the target's family as the draft, or `--draft ngram`"


def check_contents(name: str, folder: Path, has_weights: bool = True) -> None:
    """Refuse a folder that holds something else than a causal LM, by what it is.

    Args:
        name: the model's name in messages.
        folder: where it is.
        has_weights: its weights are wanted, too.

    Raises:
        UsageError: it holds something that this engine does not run.
        RunError: its files are git-lfs pointers, or it holds no model at all.
    """
    for pattern in _SMALL:
        for path in sorted(folder.glob(pattern)):
            check_pointer(path)
    if not has_weights or is_adapter(folder):
        return
    found = next(_other_kinds(folder, _raw_config(folder)), None)
    if found is not None:
        what, hint = found
        raise UsageError(f"`{name}` is not supported: it is {what}", hint)
    if not (folder / "config.json").is_file():
        _check_is_model(name, folder)


def check_pointer(path: Path) -> None:
    """Refuse a file that only says where git-lfs keeps its content.

    Raises:
        RunError: it is one.
    """
    if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(POINTER):
        raise RunError(f"`{path}` is a git-lfs pointer, not the file itself", "run `git lfs pull` in that folder")


def _raw_config(folder: Path) -> dict[str, Any]:
    """The configuration as it stands in its file; empty where it cannot be read, which `read_config` says."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _other_kinds(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The kinds of folder other than a causal LM, each with a hint; the most specific first."""
    has_model = _has_weights(folder)
    if (folder / "model_index.json").is_file():
        yield "a diffusers pipeline (images or video)", "choose a language model"
    head = head_kind(folder, config)
    if head is not None:
        kind = config.get("speculators_model_type")
        of_kind = f" (`speculators_model_type: {kind}`)" if kind is not None else ""
        yield _HEADS[head] + of_kind, _HEAD_HINT if head in _RUN else _DRAFT_HINT
    if any((folder / file).is_file() for file in ("config_sentence_transformers.json", "modules.json")):
        yield "a sentence-transformers model, which embeds texts and cannot continue them", "choose a language model"
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and not has_model:
        yield "a folder of GGUF files (llama.cpp)", f"give one of the files: `{ggufs[0]}`"
    for pattern, found in _OTHER_FORMATS.items():
        if not has_model and any(folder.glob(pattern)):
            yield found


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of a model (peft's format) and no weights of a whole one."""
    return (folder / ADAPTER).is_file() and not _has_weights(folder)


def _has_weights(folder: Path) -> bool:
    """Whether the folder has weights under the names that transformers reads, pickled ones among them."""
    names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model*.bin")
    return any(any(folder.glob(name)) for name in names)


def head_kind(folder: Path, config: dict[str, Any]) -> str | None:
    """The kind of draft head, by what its configuration calls it, else by tensors that only such a head has."""
    if any(str(key).startswith("speculators_") for key in config):
        kind = str(config.get("speculators_model_type", "")).lower()
        return next((word for word in _HEADS if word in kind), "speculator")
    if any(str(key).startswith("medusa_num") for key in config):
        return "medusa"
    called = [config.get("model_type"), *_listed(config.get("architectures"))]
    names = " ".join(str(one).lower() for one in called)
    named = next((word for word in _HEADS if word in names), None)
    if named is None and "draft_vocab_size" in config:
        return "eagle"
    # NVIDIA's Eagle is a vision-language model.
    return named if named and "vision_config" not in config else _head_by_tensors(folder)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _head_by_tensors(folder: Path) -> str | None:
    keys = tensor_names(folder)
    for start, kind in _HEAD_TENSORS.items():
        if any(key == start or key.startswith(start) for key in keys):
            return kind
    # EAGLE joins its target's hidden state and a token's embedding in `fc`; no causal LM has one beside its layers.
    is_joined = any(key in ("fc.weight", "model.fc.weight") for key in keys)
    return "eagle" if is_joined and any("layers.0." in key for key in keys) else None


def tensor_names(folder: Path) -> list[str]:
    """Names of the tensors in the first safetensors file, or in the index; empty where neither can be read."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if whole.is_file():
            with safe_open(whole, framework="pt") as file:
                return list(file.keys())
        if not index.is_file():
            return _pickled_names(folder / "pytorch_model.bin")
        found = json.loads(index.read_text(encoding="utf-8"))
    except (SafetensorError, ValueError, OSError, RecursionError):
        return []  # `check_weights` says so
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    return list(weight_map) if isinstance(weight_map, dict) else []


def _pickled_names(path: Path) -> list[str]:
    """Strings of a pickled checkpoint, tensors' names among them; the pickle is read, not run."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next(one for one in archive.namelist() if one.endswith("data.pkl"))
            return [found for _, found, _ in pickletools.genops(archive.read(pickled)) if isinstance(found, str)]
    except Exception:  # broken in whatever way: `weights_files` refuses it, too
        return []


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
