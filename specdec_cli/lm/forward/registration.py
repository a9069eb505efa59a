"""Our attention functions and their masks, registered with transformers; its interfaces take seconds to import."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from specdec_cli.lm.cache.layout import JoinedKeys, Layout
from specdec_cli.lm.forward.apart import attend_span
from specdec_cli.lm.forward.attention import MaskFunction, RowMasks, attend, causal
from specdec_cli.lm.forward.implementations import APART, JOINED, NAME
from specdec_cli.lm.forward.joined import attend_joined


def row_masks(*, kv_length: Layout | int, mask_function: MaskFunction, **_: Any) -> RowMasks | None:
    """Mask function of transformers' interface; `kv_length` is the layout (`BlockCache.get_mask_sizes`).

    A number of keys is that of an image encoder, which does not run: a model asks for its mask all the same.
    """
    allowed = causal if mask_function is causal_mask_function else mask_function
    return RowMasks(kv_length, allowed) if isinstance(kv_length, Layout) else None


def joined_mask(*, kv_length: JoinedKeys, mask_function: MaskFunction, dtype: torch.dtype, **_: Any) -> Tensor:
    """The mask of all rows at once; `kv_length` knows the layout."""
    assert isinstance(kv_length, JoinedKeys), "the mask was asked for without the block cache"
    return RowMasks(kv_length.layout, mask_function).block_diagonal(dtype)


def span_masks(*, kv_length: JoinedKeys, mask_function: MaskFunction, **_: Any) -> RowMasks:
    """Masks of all spans, each of which takes its own."""
    assert isinstance(kv_length, JoinedKeys), "the mask was asked for without the block cache"
    return RowMasks(kv_length.layout, mask_function)


_REGISTERED = {NAME: (attend, row_masks), JOINED: (attend_joined, joined_mask), APART: (attend_span, span_masks)}
for _name, (_attend, _masks) in _REGISTERED.items():
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, _masks)
