"""Folders of trained drafts on disk: configuration and safetensors, written so that a reader never sees half of one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from specdec_cli.errors import UsageError
from specdec_cli.train.disk import writing

_LAYER_KEYS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rms_norm_eps", "max_position_embeddings", "vocab_size", "attention_bias", "mlp_bias"),
)


def layer_content(layer: Any, num: int) -> dict[str, Any]:
    """The configuration of decoder layers alone, with the keys that older readers have no defaults for."""
    known = set(type(layer)().to_dict()) - {"architectures", "transformers_version"}
    content = {key: value for key, value in layer.to_diff_dict().items() if key in known}
    content |= {key: getattr(layer, key) for key in _LAYER_KEYS if getattr(layer, key, None) is not None}
    rope = getattr(layer, "rope_parameters", None) or {}
    content |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    return content | {"model_type": layer.model_type, "num_hidden_layers": num, "tie_word_embeddings": False}


def official_eagle3(layer: Any, taps: Sequence[int], target: str | None, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of an EAGLE-3 head in the authors' format, both notations of its layers included."""
    is_llama = layer.model_type == "llama"
    content = layer_content(layer, 1) | dict(keys)
    content["architectures"] = ["LlamaForCausalLMEagle3" if is_llama else "Eagle3Qwen3ForCausalLM"]
    content["eagle_aux_hidden_state_layer_ids"] = [tap + 1 for tap in taps]  # the layers that states enter
    content["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": list(taps),  # the layers that states leave
        "use_aux_hidden_state": True,
    }
    if len(taps) != 3:
        content["num_aux_hidden_states"] = len(taps)
    return content if target is None else content | {"base_model_name_or_path": target}


_FILES = ("config.json", "model.safetensors")


def check_empty(folder: Path, force: bool, source: Path) -> None:
    """Refuse a folder for a draft that has other files.

    Args:
        folder: to write into.
        force: overwrite a draft there, if nothing else is in the folder.
        source: folder of the draft that is read.

    Raises:
        UsageError: it is not empty, or no folder.
    """
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not names and (folder.is_dir() or not folder.exists()):
        return
    message, other = f"`{folder}` already exists", next((name for name in names if name not in _FILES), None)
    if not folder.is_dir() or (force and folder.samefile(source)):
        raise UsageError(message, "name a new folder")
    if not force:
        raise UsageError(message, "name a new folder, or overwrite a draft that is alone in it with --force")
    if other is not None:
        raise UsageError(f"{message} and holds `{other}`, which no conversion writes", "name a new folder")


def write_draft(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = "model.safetensors"
) -> None:
    """Write `config.json` and the file of weights.

    Raises:
        RunError: the disk is full, or the folder cannot be written.
    """
    with writing(folder):
        weights, named = folder / f"{file}.new", folder / "config.json.new"
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, weights, {"format": "pt"})
        named.write_text(json.dumps(dict(config), indent=2, default=str) + "\n", encoding="utf-8")
        weights.replace(folder / file)
        named.replace(folder / "config.json")
