"""The attention implementations by the names under which transformers calls them, and which of them a model takes.

This module imports neither them nor transformers' models: our own decoder needs none.
"""

from __future__ import annotations

from typing import Any

from specdec_cli.lm.files.architecture import setting
from specdec_cli.lm.files.classes import model_class_of

NAME = "specdec"
"""Of `lm.forward.attention`."""
JOINED = "specdec_joined"
"""Of `lm.forward.joined`."""
APART = "specdec_apart"
"""Of `lm.forward.apart`."""

# Families whose attention computes with keys, values or masks before it calls the attention function.
_READS_KEYS = {"diffllama", "doge", "inkling2_text", "inkling_text", "jetmoe"}
# Layers, and a family, whose attention is computed for each span.
_APART = {"compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse", "qwen4_exp_text"}


def attention_of(config: Any) -> str:
    """The attention that a family takes: ours where it can be replaced, over joined keys where it reads them."""
    model_class = model_class_of(config)
    if model_class is not None and not model_class._can_set_attn_implementation():
        return "sdpa" if model_class._supports_sdpa else "eager"
    text = config.get_text_config()
    if not _APART.isdisjoint({text.model_type, *(getattr(text, "layer_types", None) or ())}):
        return APART
    return JOINED if setting(text, "index_topk") or text.model_type in _READS_KEYS else NAME
