"""Latents of multi-head latent attention (MLA): what the cache keeps of a token, and the keys and values made of it.

A family with MLA (DeepSeek V2 and V3, Kimi-K2, GLM-4.7-Flash, MiniCPM3, ...) caches one compressed vector and one
rotated key for all heads. transformers' attention expands them by its method `expand_kv` before it attends. Here the
expansion waits until attention reads a sequence's part of the block cache. Tested with transformers 5.17 to 5.24.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from specdec_cli.lm.cache.cache import LayerStore
from specdec_cli.lm.cache.latents import Expand, ExpandedStore


def keep_latents(model: Any) -> bool:
    """Let a model's attention expand latents where it reads them; whether it has any.

    transformers' own forward, on its own cache or none, is as it was.
    """
    has_latents = False
    for module in model.modules():
        expand = getattr(module, "expand_kv", None)
        if expand is not None:
            has_latents = True
            if "expand_kv" not in vars(module):
                module.expand_kv = _expanding_later(expand)
    return has_latents


def _expanding_later(expand: Expand) -> Expand:
    """`expand_kv` that leaves what lies in a block cache as it is."""

    @wraps(expand)
    def expand_kv(latents: Any, rotated: Any) -> tuple[Any, Any]:
        if isinstance(latents, LayerStore):
            store = ExpandedStore(latents, expand)
            return store, store
        return expand(latents, rotated)

    return expand_kv
