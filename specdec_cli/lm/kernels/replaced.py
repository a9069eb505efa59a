"""Functions of torch, replaced while a module runs: for classes that compute with weights or keys themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]


def replace_in(module: nn.Module, functions: Mapping[Function, Function]) -> None:
    """Have a module's forward, and what it calls, run other functions in the place of torch's."""
    if not isinstance(module.forward, _Replacing):
        module.forward = _Replacing(module.forward)
    module.forward.functions.update(functions)


def calls(module: nn.Module, *names: str) -> bool:
    """Whether the code of a module's methods names one of some functions."""
    methods = [inspect.unwrap(method) for method in vars(type(module)).values() if inspect.isfunction(method)]
    return any(name in method.__code__.co_names for method in methods for name in names)


def own_forward(module: nn.Module) -> Function:
    """A module's forward, without replaced functions."""
    forward: Function = module.forward
    return forward.forward if isinstance(forward, _Replacing) else forward


class _Replacing:
    """A module's forward under a mode."""

    def __init__(self, forward: Function) -> None:
        self.forward = forward
        self.functions: dict[Function, Function] = {}

    def __call__(self, *given: Any, **named: Any) -> Any:
        with _Replaced(self.functions):
            return self.forward(*given, **named)


class _Replaced(TorchFunctionMode):
    def __init__(self, functions: Mapping[Function, Function]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, or the one in its place."""
        return self._functions.get(func, func)(*args, **(kwargs or {}))
