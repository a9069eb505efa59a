"""A module's forward in which some names of its Python module mean something else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any


def with_globals(module: Any, names: Mapping[str, Any]) -> Callable[..., Any]:
    """The forward of a module's class with other globals; the class and its Python module stay as they are."""
    given = inspect.unwrap(type(module).forward)
    bound = FunctionType(
        given.__code__, {**given.__globals__, **names}, given.__name__, given.__defaults__, given.__closure__
    )
    bound.__kwdefaults__ = given.__kwdefaults__
    forward: Callable[..., Any] = bound.__get__(module)
    return forward


def names_in_forward(module: Any, names: Iterable[str]) -> bool:
    """Whether the forward of a module's class uses one of some names."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and not set(names).isdisjoint(code.co_names)
