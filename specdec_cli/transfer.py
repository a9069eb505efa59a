"""Copies between the host and a device: to it without waiting, and back with a wait once they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sent(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values of the host on a device. The host does not wait for a GPU that still has other work."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class HostCopy:
    """Values of a device on their way to the host.

    Args:
        parts: tensors of one shape and dtype. They may be overwritten by what the device is given later.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        first = parts[0]
        self._here = torch.empty((len(parts), *first.shape), dtype=first.dtype, pin_memory=first.is_cuda)
        for here, part in zip(self._here, parts, strict=True):
            here.copy_(part, non_blocking=True)
        cuda: Any = torch.cuda
        self._arrival = cuda.Event() if first.is_cuda else None
        if self._arrival is not None:
            self._arrival.record(cuda.current_stream(first.device))

    def read(self) -> Tensor:
        """All parts [n, ...] on the host, which waits for them."""
        if self._arrival is not None and not self._arrival.query():
            self._arrival.synchronize()
        return self._here
