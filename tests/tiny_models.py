"""Tiny random checkpoints of many families, for tests: real folders that transformers saves and loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCAB = 97
WINDOW = 11

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW, "num_hidden_layers": 3}
_GEMMA |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24}
_LONG_ROPE |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 4.0], "factor": 4.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "head_dim": 8, **_MOE}),
    "gemma2": ("Gemma2Config", {"attn_logit_softcapping": 5.0, **_GEMMA}),
    "gemma3_text": ("Gemma3TextConfig", _GEMMA),
    "phi3": ("Phi3Config", {}),
    "phi3_long": ("Phi3Config", {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 24}),
    "gpt2": ("GPT2Config", {"n_inner": 48}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False, "bias": False}),
    "starcoder2": ("Starcoder2Config", {}),
    "bitnet": ("BitNetConfig", {}),
}
# What the issue asks for beside: the same shape of attention with sinks, and one more without the attention interface.
EXTRA_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "head_dim": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "gptj": ("GPTJConfig", {"rotary_dim": 8}),
}
# Families that our own decoder runs beside those above.
OWN_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "olmo3": (
        "Olmo3Config",
        {"sliding_window": WINDOW, "num_hidden_layers": 3, "layer_types": _GEMMA["layer_types"]},
    ),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "ministral": (
        "MinistralConfig",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8},
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 4.0,
            "attention_multiplier": 0.2,
            "tie_word_embeddings": True,
        },
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
}

_FILES = ("config.json", "generation_config.json", "model.safetensors")
_SAVED: dict[str, dict[str, bytes]] = {}
"""The files of each checkpoint that this process has made: many tests ask for the same one."""


def make_tiny(family: str, folder: str | Path, seed: int = 0, vectors: float = 0.0, **overrides: Any) -> Path:
    """Save a random checkpoint of a family; its texts wander instead of repeating one token.

    Norms, biases and sinks are those of a new model, or differ from these by so much.
    """
    folder = Path(folder)
    key = repr((family, seed, vectors, sorted(overrides.items())))
    if key not in _SAVED:
        _save(family, folder, seed, vectors, overrides)
        _SAVED[key] = {path.name: path.read_bytes() for path in folder.iterdir() if path.name in _FILES}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _SAVED[key].items():
        (folder / name).unlink(missing_ok=True)  # a loaded model may have it in its memory
        (folder / name).write_bytes(content)
    return folder


def _save(family: str, folder: Path, seed: int, vectors: float, overrides: dict[str, Any]) -> None:
    config_name, own = (FAMILIES | EXTRA_FAMILIES | OWN_FAMILIES)[family]
    config = getattr(transformers, config_name)(**(_SHAPE | own | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    scale = 1.0 if "embed" in name or "wte" in name else 2.5 * parameter.shape[-1] ** -0.5
                    parameter.normal_(0, scale)
                elif vectors:
                    parameter.add_(vectors * torch.randn_like(parameter))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
