"""Counts where the host would wait for a GPU, while a CPU stands in for one."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_READS = {
    "tolist",
    "item",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "__array__",
}
_SIZED = {"nonzero", "masked_select", "unique", "equal", "argwhere"}
_FROM_HOST = {"tensor", "as_tensor", "from_numpy", "frombuffer"}
_INDEXED = {"__getitem__", "__setitem__"}
_HERE = Path(__file__).parents[1]


class HostWaits(TorchFunctionMode):
    """Counts waits by the line of the package that waits.

    Tensors of data that the host brings are the host's, and what is computed from these alone; all others are taken to
    be a GPU's. A read of one of these waits, and so does a copy to it that is not `non_blocking`, an index that the
    host brings, and an operation whose result's size follows from numbers. What a stand-in of `graphs.record` replays
    is left out (`paused`), as a GPU runs it without the host.

    Attributes:
        lines: how often each line waited, as `file:function`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()
        self.paused = False

    @property
    def num(self) -> int:
        """All waits."""
        return self.lines.total()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func == Tensor.is_cpu.__get__ and not _is_host(args[0]):  # type: ignore[attr-defined]
            return False
        if self.paused or name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        if self._waits(name, args, kwargs):
            self.lines[_line()] += 1
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_host = all(map(_is_host, tensors)) and not _goes_to_device(name, args, kwargs)
        for leaf in () if name == "copy_" else tree_leaves(result):
            if isinstance(leaf, Tensor) and _is_host(leaf) != is_host:
                leaf.is_host = is_host  # type: ignore[attr-defined]
        return result

    def _waits(self, name: str, args: Any, kwargs: Any) -> bool:
        first = args[0] if args else None
        if name in _READS or name in _SIZED:
            return isinstance(first, Tensor) and not _is_host(first)
        if name in _FROM_HOST:
            return _goes_to_device(name, args, kwargs) and not (isinstance(first, Tensor) and not _is_host(first))
        if name == "copy_":
            return _is_host(args[1]) and not _is_host(first) and not kwargs.get("non_blocking")
        if name in ("to", "cuda"):
            return _is_host(first) and _goes_to_device(name, args, kwargs) and not kwargs.get("non_blocking")
        if name in _INDEXED and not _is_host(first):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            return any(isinstance(part, list) or _is_index(part) for part in parts)
        return False


def _goes_to_device(name: str, args: Any, kwargs: Any) -> bool:
    given = [kwargs.get("device"), *(args[1:] if name in ("to", "cuda") else ())]
    return any(isinstance(one, str | torch.device) for one in given)


def _is_host(tensor: Any) -> bool:
    return getattr(tensor, "is_host", False)


def _is_index(part: Any) -> bool:
    """Whether an index comes from the host, or its result's size from numbers."""
    return isinstance(part, Tensor) and (_is_host(part) or part.dtype == torch.bool)


def _line() -> str:
    """The innermost function of the package or its tests that runs now."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_HERE):
            return f"{path.relative_to(_HERE)}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"
