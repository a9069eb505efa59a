"""Whether this engine supports a configuration's architecture. Others are refused by name before weights are read.

A configuration that passes can still fail the probe (`lm.forward`); what is refused here is known to fail, or would
decode something else than the model says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.checkpoint import FAMILIES
from specdec_cli.lm.files.classes import model_class_of

HEADS = ("CausalLM", "LMHeadModel", "LMHead", "ForConditionalGeneration")
SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
SUPPORTED_LAYERS |= {"compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse"}
STATEFUL = {
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling2_text", "inkling_text",
    "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba",
    "zamba2", "zaya",
}  # fmt: skip
"""Families with a recurrent or convolutional state that `lm.families` carries."""
_RECURRENT = "keeps a recurrent state in a way of its own, which cannot be cut back after a rejected draft"
_HYBRID = "keeps a state beside keys and values in a way of its own, which cannot be cut back after a rejected draft"
LAYERS = {
    "window_attention": "attends within windows in both directions",
    "reference_sliding_attention": "attends to the prompt and a window behind it",
    "conv": "has short convolutions in some layers instead of attention",
    "moe": "has layers of experts alone, without attention",
    "linear_attention": _RECURRENT,
    "hybrid": _HYBRID,
    "hybrid_sliding": _HYBRID,
}
"""Reasons why layer types are not supported, by their name in `layer_types`."""
STATEFUL_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "moe", "mlp"}
"""Layer types that the stateful families have beside attention."""
_NEEDS_IMAGE = "continues no text without an image"
_NOT_DECODER_ONLY = "belongs to an encoder or an encoder-decoder; only decoder-only models are supported"
_ENCODERS = (
    "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text "
    "electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet rembert roberta roberta-prelayernorm "
    "roc_bert roformer trocr whisper xlm-roberta xlm-roberta-xl xmod"
)
_EARLY = "is an early architecture that is no longer in use"
TYPES = {
    **dict.fromkeys(_ENCODERS.split(), _NOT_DECODER_ONLY),
    **dict.fromkeys(("cpmant", "ctrl", "git", "openai-gpt", "xlnet"), _EARLY),
    "blip": _NEEDS_IMAGE,
    "blip-2": _NEEDS_IMAGE,
    "blt": "works on bytes in patches of their own, with an encoder and a decoder around the language model",
    "deepseek_vl_hybrid": "takes one attention for all its parts, and its image encoder knows none but its own",
    "gemma4_assistant": "drafts from its target's hidden states (multi-token prediction)",
    "gemma4_unified_assistant": "drafts from its target's hidden states (multi-token prediction)",
    "instructblip": _NEEDS_IMAGE,
    "instructblipvideo": _NEEDS_IMAGE,
    "kosmos-2": _NEEDS_IMAGE,
    "kosmos-2.5": "counts positions from its padding token on",
    "paligemma": "attends in both directions within a prompt",
    "pi0": "plans the movements of a robot",
    "qianfan_ocr": "builds its image encoder by numbers that it computes, which doctor cannot follow",
    "reformer": "hashes its keys into buckets (LSH attention)",
    "xlm": "keeps a cache of its own",
}
"""Reasons why model families are not supported, by their `model_type`."""


def check_architecture(name: str, config: Any, trust_remote_code: bool) -> None:
    """Refuse what cannot be a target or a draft, by what it is, before any weight is read.

    Raises:
        UsageError: it is no causal LM, or one that this engine cannot run.
        RunError: a size below one.
    """
    hint = f"choose a causal LM of another family ({FAMILIES})"
    kind = config.model_type
    if model_class_of(config) is None:
        if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
            return
        raise _not_causal(name, config)
    reason = next(_reasons(config), None)
    if reason is not None:
        raise UsageError(f"architecture `{kind}` of `{name}` is not supported: it {reason}", hint)
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(f"architecture `{kind}` of `{name}` is an encoder-decoder, which is not supported", hint)
    check_sizes(name, config)
    given = getattr(config, "architectures", None) or model_class_of(config).__name__
    written_for = [given] if isinstance(given, str) else given
    if not any(architecture.endswith(HEADS) for architecture in written_for):
        raise UsageError(f"`{name}` is a `{written_for[0]}`, not a causal LM", hint)


def carries_state(config: Any) -> bool:
    """Whether a supported family's layers carry a state; a model of it may have attention alone (Granite 4 Micro)."""
    text = config.get_text_config()
    layers = getattr(text, "layer_types", None)
    return text.model_type in STATEFUL and (not layers or not SUPPORTED_LAYERS.issuperset(layers))


def check_sizes(name: str, config: Any) -> None:
    """Refuse a configuration with a size that no model has.

    Raises:
        RunError: a number of layers or heads, a width, a vocabulary or a context limit below one.
    """
    text = config.get_text_config()
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"):
        size = setting(text, key)
        if isinstance(size, int) and size < 1:
            raise RunError(f"the `config.json` of `{name}` says `{key}: {size}`", "copy or download the model again")


def setting(config: Any, key: str, default: Any = None) -> Any:
    """A configuration's value; where it differs between layers, the first layer's that has one."""
    if key not in (getattr(config, "per_layer_attributes", None) or ()):
        return getattr(config, key, default)
    return next((value for layer in config.per_layer_config if (value := getattr(layer, key, None))), default)


def _reasons(config: Any) -> Iterator[str]:
    """Why a causal LM is not decoded, the most telling first."""
    text = config.get_text_config()
    layers = sorted(set(getattr(text, "layer_types", None) or ()))
    model_class = model_class_of(config)
    if config.model_type in TYPES:
        yield TYPES[config.model_type]
    is_carried = text.model_type in STATEFUL
    for layer in layers:
        if layer not in SUPPORTED_LAYERS and not (is_carried and layer in STATEFUL_LAYERS):
            yield LAYERS.get(layer, f"has layers of type `{layer}`")
    # A hybrid family is written for a state; one of its models may have attention in every layer (Granite 4).
    if getattr(model_class, "_is_stateful", False) and not layers and not is_carried:
        yield _RECURRENT


def _not_causal(name: str, config: Any) -> UsageError:
    """The error for a configuration that transformers does not list among the causal LMs."""
    import transformers

    kind = config.model_type
    hint = f"choose a causal LM ({FAMILIES})"
    if (
        getattr(config, "is_encoder_decoder", False)
        or type(config) in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    ):
        what = "is an encoder-decoder, which is not supported"
    elif config.get_text_config() is not config:
        what = "is a multimodal model that does not continue text"
    elif type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING:
        what = "is an encoder: it reads text in both directions and cannot continue it"
    else:
        what = "is not a causal LM"
    return UsageError(f"architecture `{kind}` of `{name}` {what}", hint)
