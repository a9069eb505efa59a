"""Positions that a forward would count from its cache's length, taken from each token of a packed forward instead.

Most families take position ids. Some find a token's position themselves: learned or sinusoidal tables of decoders like
BART and Whisper, and biases that grow with a key's position (ALiBi: BLOOM, MPT, Falcon). What computes those is
replaced by a version that looks at the layout while one runs, and leaves transformers' own calls as they were.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.cache.cache import running_layout

_BIASES = ("build_alibi_tensor", "build_mpt_alibi_tensor")


def takes_position_ids(model: Any) -> bool:
    """Whether a model's forward is given position ids."""
    return "position_ids" in inspect.signature(model.forward).parameters


def place_tokens(model: Any) -> bool:
    """Let a model read positions from the layout that runs; whether it has a way to know them.

    Args:
        model: a transformers causal LM, on paper too.
    """
    has_biases = [_bias_by_position(sys.modules[type(model).__module__], name) for name in _BIASES]
    if takes_position_ids(model):
        return True
    has_tables = [_read_at_positions(module) for module in model.modules()]
    return any(has_tables) or any(has_biases)


def _read_at_positions(table: Any) -> bool:
    """Replace the forward of a table of positions; False for any other module."""
    names = inspect.signature(table.forward).parameters
    counts = "past_key_values_length" in names or "cache_length" in names  # the latter since transformers 5.24
    if not counts or "position_ids" not in names or not hasattr(table, "embedding_dim"):
        return False
    if "forward" in vars(table):
        return True
    own = table.forward

    @wraps(own)
    def read(*given: Any, **named: Any) -> Tensor:
        layout = running_layout()
        if layout is not None:
            named["position_ids"] = layout.position_ids[0]
        found: Tensor = own(*given, **named)
        return found

    table.forward = read
    return True


def _bias_by_position(module: Any, name: str) -> bool:
    """Replace a modelling file's function that makes ALiBi's biases; False where it has none."""
    own = getattr(module, name, None)
    if own is None:
        return False
    if not hasattr(own, "__wrapped__"):
        setattr(module, name, _for_joined_keys(own))
    return True


def _for_joined_keys(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Biases [H, 1, T] of the joined keys of a layout, by the position of each in its sequence."""
    takes_mask = "attention_mask" in inspect.signature(own).parameters

    @wraps(own)
    def biases(*given: Any, **named: Any) -> Tensor:
        layout = running_layout()
        if layout is None:
            return own(*given, **named)
        call = inspect.signature(own).bind(*given, **named).arguments
        num_keys = max(span.num_keys for span in layout.spans)
        if takes_mask:
            call["attention_mask"] = torch.ones(1, num_keys, dtype=torch.int64, device=layout.device)
        else:
            call["sequence_length"] = num_keys
        return own(**call).index_select(2, layout.joined_key_positions)

    return biases
