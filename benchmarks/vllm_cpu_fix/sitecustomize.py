"""Repairs sampled speculation in vLLM 0.32.0's CPU build, where this folder is on PYTHONPATH.

Its `expand_kernel` for CPUs fills a converted copy of the temperatures and throws it away (vllm-project/vllm#55005).
With this module the values reach the caller, so that vLLM verifies by its own rule.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_BROKEN = "vllm.utils.cpu_triton_utils"


def expand(output: Any, values: Any, cumulative: Any, replace_from: Any, replace_to: Any, *_: Any) -> None:
    """Each request's value for each of its drafted tokens, in place."""
    import torch

    counts = torch.diff(cumulative, prepend=cumulative.new_zeros(1)).long()
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    output.copy_(torch.repeat_interleave(replaced, counts))


class Repairing:
    """Finds the broken module and replaces the one function once it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """The module's own spec, with a loader that repairs it."""
        spec = PathFinder.find_spec(name, path, target) if name == _BROKEN else None
        if spec is not None and spec.loader is not None:
            self._repair_after(spec)
        return spec

    def _repair_after(self, spec: ModuleSpec) -> None:
        assert spec.loader is not None, "a module in a file"
        execute = spec.loader.exec_module

        def execute_and_repair(module: ModuleType) -> None:
            execute(module)
            module._expand_kernel_impl = expand  # type: ignore[attr-defined]

        spec.loader.exec_module = execute_and_repair  # type: ignore[method-assign]


sys.meta_path.insert(0, Repairing())
