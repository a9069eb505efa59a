"""When a step's parts begin and end: by the host's clock, or by device events, without waiting for them."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch


class Clock:
    """Marks moments of what a device is given to do.

    Args:
        device: where the work is done; on a CPU when it is given.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._stream: Any = None

    def mark(self) -> Any:
        """This moment, or that at which a GPU comes to it."""
        if not self._is_cuda:
            return perf_counter()
        cuda: Any = torch.cuda
        event = cuda.Event(enable_timing=True)
        if self._stream is None:
            self._stream = cuda.current_stream(self._device)  # to ask for it takes longer than to mark a moment
        event.record(self._stream)
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to another; waits for a GPU that has not come to it yet."""
        if not self._is_cuda:
            return float(end - begin)
        if not end.query():
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
