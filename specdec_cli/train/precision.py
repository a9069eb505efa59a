"""Precision of a draft's matrix products while it trains. Its weights and AdamW's moments are always float32."""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["float32", "bfloat16"]


def product_precision(setting: Literal["auto", "float32", "bfloat16"], device: torch.device) -> Precision:
    """The precision that a setting means on a device: `auto` takes bfloat16 where the hardware multiplies it."""
    if setting != "auto":
        return setting
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if device.type == "cpu" and torch.cpu._is_avx512_bf16_supported() else "float32"
