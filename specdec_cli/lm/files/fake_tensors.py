"""A model of fake tensors: what the engine's own loader makes of a checkpoint's headers, every size and no memory.

Tensors of torch's fake mode have a shape, a dtype and a device, and no numbers. A checkpoint's weights become such
tensors from the headers of its files, transformers loads them as it loads any others (renaming, joining experts,
tying, quantization), and the result runs the probe of `lm.forward`. So `doctor` finds what loading would find.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""Errors of a forward pass on meta tensors that branches on the values it computes."""

_SIZES = (("inkling.modeling_inkling", "plan_out_scales"),)
"""Functions of transformers' models that compute the sizes of layers with tensors."""


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make every tensor without its numbers, and let transformers load in this thread alone."""
    torch_logs = [logging.getLogger(f"torch.{room}") for room in ("_subclasses.fake_tensor", "fx.experimental")]
    levels = [log.level for log in torch_logs]
    was_sequential = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # fake mode holds for one thread
    for log in torch_logs:
        log.setLevel(logging.CRITICAL)
    try:
        # Fake tensors are not for inference mode, which a caller may be in.
        for module, name in _SIZES:
            _compute_with_numbers(sys.modules.get(f"transformers.models.{module}"), name)
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        with torch.inference_mode(mode=False), mode, patch("torch.utils.swap_tensors", _give_data):
            yield
    finally:
        for log, level in zip(torch_logs, levels, strict=True):
            log.setLevel(level)
        if was_sequential is None:
            del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        else:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = was_sequential


def _give_data(parameter: Tensor, converted: Tensor) -> None:
    """Cast a module's parameter in place; torch cannot swap it, because fake mode itself refers to it."""
    parameter.data = converted.data


def _compute_with_numbers(module: Any, name: str) -> None:
    """Let a function of a module, if that was imported, have its numbers there, too."""
    own: Callable[..., Any] | None = getattr(module, name, None)
    if own is None or hasattr(own, "__wrapped__"):
        return

    @wraps(own)
    def compute(*given: Any, **named: Any) -> Any:
        with unset_fake_temporarily() as mode:
            result = own(*given, **named)
        return result if mode is None else result.tolist()  # layers are sized by plain numbers

    setattr(module, name, compute)
