"""Drafts of every published format in the shape of the built-in target, without training: they cost what they cost.

Heads have random weights, so nothing that they draft is accepted. PARD is the built-in draft with a mask token that it
never learned, PARD-2 the same with a projection of zeros: their first token is the built-in draft's, the others are as
good as random. The MTP module stands in a copy of the target, whose other weights are the built-in one's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import specdec_cli

BUILTIN = Path(specdec_cli.__file__).parent / "builtin"
MASK = 0
TAPS = (2, 7, 11)


def save_target(folder: Path) -> Path:
    """The built-in target with an MTP module, under DeepSeek's names."""
    shutil.copytree(BUILTIN / "target", folder)
    config = _config("target")
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (folder / "model.safetensors").rename(folder / first)
    hidden, start = config["hidden_size"], f"model.layers.{config['num_hidden_layers']}."
    module = {f"{start}{name}": one for name, one in _layer(config).items()}
    module |= {f"{start}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    module[f"{start}eh_proj.weight"] = _random(hidden, 2 * hidden)
    save_file(module, folder / second, {"format": "pt"})
    where = dict.fromkeys(load_file(folder / first), first) | dict.fromkeys(module, second)
    _write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    _write(folder / "config.json", config | {"num_nextn_predict_layers": 1})
    return folder


def save_drafts(folder: Path) -> dict[str, str]:
    """A draft of each format, as `--draft` takes them, by name."""
    for name, save in (
        ("eagle3", _save_eagle3),
        ("p-eagle", lambda to: _save_eagle3(to, is_masked=True)),
        ("dflash", _save_dflash),
        ("medusa", _save_medusa),
        ("pard", _save_pard),
        ("pard2", _save_pard2),
    ):
        save(folder / name)
    names = [one.name for one in sorted(folder.iterdir())]
    return {f"untrained {name}": str(folder / name) for name in names} | {"untrained mtp": "mtp"}


def _save_eagle3(folder: Path, is_masked: bool = False) -> None:
    config = _config("target")
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    weights = {f"layers.0.{name}": one for name, one in _layer(config, 2 * hidden).items()}
    weights |= {f"layers.0.{name}.weight": torch.ones(hidden) for name in ("hidden_norm", "input_layernorm")}
    weights |= {"fc.weight": _random(hidden, 3 * hidden), "lm_head.weight": _random(vocabulary, hidden)}
    weights |= {"norm.weight": torch.ones(hidden), "embed_tokens.weight": _random(vocabulary, hidden)}
    keys: dict[str, Any] = {}
    if is_masked:
        weights["mask_hidden"] = _random(1, 1, 3 * hidden)
        keys = {"mask_token_id": MASK}
    kind = "peagle" if is_masked else "eagle3"
    _save(folder, weights, {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": kind, "speculators_version": "0.9.0",
        "transformer_layer_config": config | {"num_hidden_layers": 1, "tie_word_embeddings": False},
        "eagle_aux_hidden_state_layer_ids": [one + 1 for one in TAPS], "draft_vocab_size": vocabulary,
        "target_hidden_size": hidden, **keys,
    })  # fmt: skip


def _save_dflash(folder: Path, num_layers: int = 2) -> None:
    config = _config("target")
    hidden, size = config["hidden_size"], config["head_dim"]
    weights = {"fc.weight": _random(hidden, len(TAPS) * hidden)}
    weights |= {f"{name}.weight": torch.ones(hidden) for name in ("hidden_norm", "norm")}
    for i in range(num_layers):
        weights |= {f"layers.{i}.{name}": one for name, one in _layer(config).items()}
        weights |= {f"layers.{i}.self_attn.{name}_norm.weight": torch.ones(size) for name in "qk"}
    _save(folder, weights, config | {
        "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "num_hidden_layers": num_layers,
        "num_target_layers": config["num_hidden_layers"], "block_size": 8,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
    })  # fmt: skip


def _save_medusa(folder: Path, num_heads: int = 4) -> None:
    config = _config("target")
    hidden, weights = config["hidden_size"], dict[str, Tensor]()
    for i in range(num_heads):
        weights |= {f"{i}.0.linear.weight": _random(hidden, hidden), f"{i}.0.linear.bias": torch.zeros(hidden)}
        weights[f"{i}.1.weight"] = _random(config["vocab_size"], hidden)
    folder.mkdir(parents=True)
    keys = {"base_model_name_or_path": "builtin:target", "medusa_num_heads": num_heads, "medusa_num_layers": 1}
    _write(folder / "config.json", keys)
    save_file(weights, folder / "medusa_lm_head.safetensors")


def _save_pard(folder: Path, **keys: Any) -> None:
    shutil.copytree(BUILTIN / "draft", folder)
    _write(folder / "config.json", _config("draft") | {"pard_token": MASK, "spd_type": "pard", **keys})


def _save_pard2(folder: Path) -> None:
    hidden = _config("draft")["hidden_size"]
    width = 3 * _config("target")["hidden_size"]
    _save_pard(
        folder, spd_type="pard2", pard2_target_layers=[-1, -5, -9], pard2_scale=1.0, pard2_proj_bias=False,
        pard2_target_dim=width,
    )  # fmt: skip
    torch.save({"target_proj.weight": torch.zeros(hidden, width)}, folder / "warp_model.bin")


def _layer(config: dict[str, Any], width: int | None = None) -> dict[str, Tensor]:
    """Random weights of a Llama layer; `width` is what attention reads, where it is not the hidden size."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, groups = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    width = width or hidden
    shapes = {
        "self_attn.q_proj": (heads, width), "self_attn.k_proj": (groups, width), "self_attn.v_proj": (groups, width),
        "self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    found = {f"{name}.weight": _random(*shape) for name, shape in shapes.items()}
    return found | {f"{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    weight: Tensor = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    return weight


def _config(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BUILTIN / model / "config.json").read_text())
    return found


def _save(folder: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    _write(folder / "config.json", config)
    save_file(weights, folder / "model.safetensors")


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))
