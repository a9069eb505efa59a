"""ALiBi: biases that grow with a key's position, in BLOOM, MPT and the first Falcon.

Their functions count positions from the number of keys. While a packed forward runs, they give each of the joined keys
the bias of its position in its sequence. Tested with transformers 5.17 to 5.24.
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


def bias_by_position(model: Any) -> bool:
    """Replace the functions of a model's Python module that make biases; whether it has any."""
    return any(_replace(sys.modules[type(model).__module__], name) for name in _BIASES)


def _replace(module: Any, name: str) -> bool:
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
