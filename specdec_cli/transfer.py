"""Copies from the host to a device for which the host does not wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sent(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values of the host on a device. The host does not wait for a GPU that still has other work."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
