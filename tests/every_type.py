"""A tiny random checkpoint of every model type that transformers lists among the causal LMs."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
WRAPPERS = tuple(sorted(set(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) - set(TYPES)))
MOST_PARAMETERS = 36_000_000
VOCAB = 97

_SIZES = {
    32: "hidden_size n_embd d_model dim embed_dim word_embed_proj_dim emb_dim embedding_size lru_width",
    48: "intermediate_size ffn_dim d_inner n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dff dim_feedforward",
    4: "num_hidden_layers n_layer n_layers num_layers num_blocks num_attention_heads n_head n_heads num_heads "
    "encoder_attention_heads decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts mamba_n_heads linear_num_value_heads",
    2: "encoder_layers decoder_layers num_encoder_layers num_decoder_layers num_key_value_heads n_head_kv num_kv_heads "
    "num_experts_per_tok moe_topk top_k_experts moe_k linear_num_key_heads eos_token_id",
    8: "head_dim kv_channels d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim mamba_d_state state_size "
    "linear_key_head_dim linear_value_head_dim global_head_dim hidden_size_per_layer_input rotary_dim",
    128: "max_position_embeddings n_positions n_ctx max_seq_len seq_length",
    11: "sliding_window window_size local_attention attention_window_size",
    24: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    16: "q_lora_rank kv_lora_rank mamba_d_head",
    5: "index_topk",
    1: "n_group topk_group mamba_n_groups bos_token_id",
    0: "pad_token_id num_kv_shared_layers",
    VOCAB: "vocab_size vocab_size_per_layer_input",
}
SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HYBRID = ["mamba", "mamba", "hybrid"] * 2
_INDEXER = {"indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
_SHARED = {"num_hidden_layers": 2, "num_kv_shared_layers": 2, "hidden_size": 32, "intermediate_size": 48}
_SHARED |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB}
_SHARED |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_LATENT = "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite longcat_flash minicpm3 youtu axk2 deepseek_v32 glm_moe_dsa hy_v4"
_LATENT += " mistral4 mistral_large4_text"
_THREE_AXES = (
    "qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text paddleocr_vl_text glm4v_text glm_ocr_text hunyuan_vl_text"
)
_SLIDING_LATENT = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
_SLIDING_LATENT |= {"head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 8}
_LINEAR, _FULL = "linear_attention", "full_attention"
_KIMI = {"linear_num_heads": 4, "linear_head_dim": 8, "mlp_layer_types": ["dense", "dense"]}
_INKLING = {"layer_types": ["hybrid", "hybrid_sliding"], "num_hidden_layers": 2, "sliding_window_size": 11, "d_rel": 4}
_INKLING |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "rel_extent": 13}
_INKLING |= {"log_scaling_n_floor": 5, "log_scaling_alpha": 0.7, "unpadded_vocab_size": VOCAB}
# Families whose layers carry a state, each with attention beside it where it can be.
HYBRIDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_key_value_heads": 4, "layer_types": [_LINEAR, _FULL], "num_hidden_layers": 2},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {
        "num_hidden_layers": 2,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
    },
    "falcon_mamba": {"num_hidden_layers": 2},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 0,
    },
    "inkling_text": {**_INKLING, "mlp_layer_types": ["dense", "dense"]},
    "inkling2_text": _INKLING,
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 1},
    "kimi_linear": {**_KIMI, "num_key_value_heads": 4, "layer_types": [_LINEAR, _FULL], "num_hidden_layers": 2},
    "lfm2": {"layer_types": ["conv", _FULL, "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", _FULL, "conv"], "num_hidden_layers": 3},
    "lfm3": {},
    "mamba": {"num_hidden_layers": 2},
    "mamba2": {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
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
    "qwen4_exp_text": {
        **_INDEXER,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 1000,
        "hc_lowrank": 8,
        "layer_types": [_LINEAR, "indexed_attention", _LINEAR],
        "num_hidden_layers": 3,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
    },
    "recurrent_gemma": {},
    "rwkv": {"num_hidden_layers": 2},
    "xlstm": {"num_hidden_layers": 2, "num_blocks": 2, "hidden_size": 128, "embedding_dim": 128},
    "zamba": {"layers_block_type": [_LINEAR, "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"time_step_min": 1e-9, "num_hidden_layers": 6, "layers_block_type": _HYBRID},
    "zaya": {
        "num_experts_per_tok": 1,
        "num_hidden_layers": 2,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "router_hidden_size": 16,
    },
}
OWN: dict[str, dict[str, Any]] = {
    **HYBRIDS,
    **{one: {"num_key_value_heads": 4} for one in _LATENT.split()},  # keys are made for every head
    **{one: {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}} for one in _THREE_AXES.split()},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "glm4v_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
    **{one: {"vision_start_token_id": 91} for one in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")},
    "inkling2_vision": {"text_hidden_size": 32},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [24, 24]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "dbrx": {
        "rope_parameters": _ROPE,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 16,  # with fewer, scores of none above zero tie
        "index_head_dim": 8,
        "index_topk": 3,
        "hc_mult": 2,
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "num_hidden_layers": 2,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "doge": {"keep_window_size": 11},
    "dots3_note_text": {"num_key_value_heads": 4} | {f"swa_{name}": size for name, size in _SLIDING_LATENT.items()},
    "llama4_text": {"attention_chunk_size": 16, "floor_scale": 5, "attn_scale": 0.7, "no_rope_layers": [1, 0, 1, 0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gemma4_assistant": {"text_config": _SHARED},
    "gemma4_unified_assistant": {"text_config": _SHARED},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 16]},
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A small configuration of a type, its parts small as well."""
    return _small(CONFIG_MAPPING[model_type], OWN.get(model_type, {}) | changes)


def _small(config_class: Any, changes: dict[str, Any]) -> Any:
    known = set(inspect.signature(config_class.__init__).parameters)
    if dataclasses.is_dataclass(config_class):
        known |= {field.name for field in dataclasses.fields(config_class)}
    given = {name: size for name, size in SMALL.items() if name in known} | changes
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        if name in changes:
            continue
        if part.__name__ == "AutoConfig":
            default = getattr(config_class(), name, None)
            part = None if default is None else type(default)
        if part is not None:
            given[name] = _small(part, OWN.get(part.model_type, {}))
    return config_class(**given)


def save_tiny(model_type: str, folder: Path, **changes: Any) -> Path:
    """Save a random checkpoint; of a type that cannot be made here (it is refused anyway), the configuration alone."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        config = tiny_config(model_type, **changes)
    except Exception:
        config = CONFIG_MAPPING[model_type]()
    config.save_pretrained(folder)
    auto = AutoModelForMultimodalLM if model_type in WRAPPERS else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            outline = auto.from_config(config)
        if sum(parameter.numel() for parameter in outline.parameters()) > MOST_PARAMETERS:
            return folder
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = auto.from_config(config, dtype=torch.float32)
    except Exception:
        return folder
    if not hasattr(model, "generation_config"):
        return folder
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if name.endswith(".qk_norm.temp"):  # Zaya's keys would all be zero
                parameter.fill_(1.0)
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 if "embed" in name or "wte" in name else 2.5 * parameter.shape[-1] ** -0.5)
    for name in ("eos_token_id", "forced_bos_token_id", "forced_eos_token_id"):
        setattr(model.generation_config, name, None)
    model.save_pretrained(folder)
    if type(model.config) is not type(config):  # a text model out of a multimodal one
        config.architectures = None
        config.save_pretrained(folder)
    return folder


def load_reference(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' own model of a checkpoint, through which text goes as its class would have it."""
    config = AutoConfig.from_pretrained(folder)
    auto = AutoModelForMultimodalLM if config.model_type in WRAPPERS else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=dtype).eval()


def save_noisy(folder: Path, beside: Path, noise: float = 0.03) -> Path:
    """Save a checkpoint's copy with noise on its matrices, which agrees with it now and then."""
    if (beside / "config.json").exists():
        return beside
    shutil.copytree(folder, beside)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        is_derived = name.endswith(("_decay", ".slope_rate"))  # MiniMax's tables of one rate
        if weight.dim() > 1 and weight.is_floating_point() and not is_derived:
            weights[name] = weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, beside / "model.safetensors", {"format": "pt"})
    return beside
