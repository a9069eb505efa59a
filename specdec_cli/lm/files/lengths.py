"""How long a model's contexts may be, by its configuration."""

from __future__ import annotations

from typing import Any

_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_WITHOUT_LIMIT = 2048


def max_context(config: Any, max_model_len: int | None) -> int:
    """The context limit in tokens: the smaller of the configuration's and the caller's."""
    limit = own_context(config)
    if limit is None:
        limit = max_model_len or _WITHOUT_LIMIT
    return min(limit, max_model_len or limit)


def own_context(config: Any) -> int | None:
    """The context limit that a configuration names, in tokens; None where it names none."""
    limits = [getattr(config, name, None) for name in _NAMES]
    return next((int(limit) for limit in limits if limit), None)


def long_rope_threshold(config: Any) -> int | None:
    """The length up to which long rope uses its short frequencies; None without long rope.

    Long rope has two sets of frequencies and switches at this length (Phi-3): keys of the one are of no use to the
    other.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    for entry in (parameters, *parameters.values()):
        if isinstance(entry, dict) and entry.get("rope_type") == "longrope":
            return int(entry["original_max_position_embeddings"])
    return None


def follows_length(config: Any) -> bool:
    """Whether rotary frequencies follow the longest position of a forward pass."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {entry.get("rope_type") for entry in (rope, *rope.values()) if isinstance(entry, dict)}
    return bool(kinds & {"dynamic", "longrope"})
