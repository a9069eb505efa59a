"""Tiny random checkpoints of the families whose layers carry a state, each with attention beside it where it can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from every_type import save_tiny

_LINEAR, _FULL = "linear_attention", "full_attention"
_KIMI = {"linear_num_heads": 4, "linear_head_dim": 8, "mlp_layer_types": ["dense", "dense"]}
HYBRIDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_key_value_heads": 4, "layer_types": [_LINEAR, _FULL], "num_hidden_layers": 2},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"num_hidden_layers": 2},
    "falcon_mamba": {"num_hidden_layers": 2},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_hidden_layers": 3,
        "num_local_experts": 0,
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 1},
    "kimi_linear": {**_KIMI, "num_key_value_heads": 4, "layer_types": [_LINEAR, _FULL], "num_hidden_layers": 2},
    "lfm2": {"layer_types": ["conv", _FULL, "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", _FULL, "conv"], "num_hidden_layers": 3},
    "lfm3": {},
    "mamba": {"num_hidden_layers": 2},
    "mamba2": {"num_hidden_layers": 2},
    "minimax": {"num_local_experts": 2, "block_size": 8, "layer_types": [_FULL, _LINEAR], "num_hidden_layers": 2},
    "nemotron_h": {
        "time_step_min": 1e-9,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "olmo_hybrid": {},
    "qwen3_5_text": {"layer_types": [_LINEAR, _FULL], "num_hidden_layers": 2},
    "qwen3_5_moe_text": {},
    "qwen3_next": {"layer_types": [_LINEAR, _FULL], "num_hidden_layers": 2, "mlp_only_layers": [0, 1]},
    "recurrent_gemma": {},
    "rwkv": {"num_hidden_layers": 2},
    "zamba": {"layers_block_type": [_LINEAR, "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"time_step_min": 1e-9},
}

EXPERTS = {"lfm2_moe", "nemotron_h", "qwen3_5_moe_text"}
"""Families whose routers may choose another expert after a rounding; the others have none here."""


def save_hybrid(family: str, folder: Path) -> Path:
    """Save a random checkpoint of a family."""
    made = save_tiny(family, folder / family, **HYBRIDS[family])
    assert (made / "model.safetensors").is_file(), f"no checkpoint of {family} was made"
    return made
