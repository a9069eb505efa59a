"""Tiny LoRA folders, written by peft, and what its own layers compute beside their base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec_cli.lm.files.reading import quiet

LINEAR = ["q_proj", "v_proj", "down_proj"]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "every linear layer": {"target_modules": "all-linear", "r": 4, "lora_alpha": 3},
    "rank-stabilized": {"use_rslora": True, "r": 6, "lora_alpha": 16},
    "DoRA": {"use_dora": True},
    "ranks by layer": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 32}, "layers_to_transform": [1]},
    "PiSSA": {"init_lora_weights": "pissa"},
    "OLoRA": {"init_lora_weights": "olora"},
    "output layer saved": {"modules_to_save": ["lm_head"]},
    "embedding and norms saved": {"modules_to_save": ["embed_tokens", "lm_head", "input_layernorm"]},
    "embedding adapted": {"target_modules": [*LINEAR, "embed_tokens"]},
    "output layer adapted": {"target_modules": [*LINEAR, "lm_head"]},
    "tokens trained": {"trainable_token_indices": [3, 5, 40]},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    "gpt_neox": {"target_modules": ["query_key_value", "dense"], "bias": "lora_only"},
    "phi3": {"target_modules": ["qkv_proj", "gate_up_proj"]},
    "gemma3_text": {"use_dora": True},
    "qwen2": {"bias": "all"},
    "qwen3_moe": {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
}


@quiet()
def make_adapter(base: Path, folder: Path, num_tokens: int | None = None, **settings: Any) -> Path:
    """Save an adapter with random numbers of a base model's folder; with so many tokens if they are given."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if num_tokens is not None:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        adapted = get_peft_model(model, LoraConfig(**{"target_modules": LINEAR, "task_type": "CAUSAL_LM"} | settings))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if parameter.requires_grad or (num_tokens and "embed" in name):
                    parameter.add_(0.3 * parameter.std().nan_to_num().clamp(min=0.1) * torch.randn_like(parameter))
    adapted.save_pretrained(str(folder), save_embedding_layers=True if num_tokens else "auto")
    return folder


@quiet()
@torch.no_grad()
def adapted_logits(base: Path, folder: Path, tokens: list[int], num_tokens: int | None = None) -> Tensor:
    """Logits [n, V] of the base model with peft's layers beside its own."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if num_tokens is not None:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
    found: Tensor = PeftModel.from_pretrained(model, str(folder)).eval()(torch.tensor([tokens])).logits[0]
    return found
