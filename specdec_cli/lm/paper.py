"""A model on paper: what the engine's own loader makes of a checkpoint's headers, every size and no memory.

Tensors of torch's fake mode have a shape, a dtype and a device, and no numbers. A checkpoint's weights become such
tensors from the headers of its files, transformers loads them as it loads any others (renaming, joining experts,
tying, quantization), and the result runs the probe of `lm.forward`. So `doctor` finds what loading would find.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""What a forward raises on paper where it branches on the numbers that it computes."""
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@contextmanager
def on_paper() -> Iterator[None]:
    """Make every tensor without its numbers, and let transformers load in this thread alone."""
    torch_logs = [logging.getLogger(f"torch.{room}") for room in ("_subclasses.fake_tensor", "fx.experimental")]
    levels = [log.level for log in torch_logs]
    was_sequential = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # fake mode holds for one thread
    for log in torch_logs:
        log.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
            yield
    finally:
        for log, level in zip(torch_logs, levels, strict=True):
            log.setLevel(level)
        if was_sequential is None:
            del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        else:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = was_sequential


def read_headers(files: list[Path]) -> dict[str, Tensor]:
    """The tensors of safetensors files by name, on paper; asked within `on_paper`."""
    found = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                header = file.get_slice(key)
                found[key] = torch.empty(header.get_shape(), dtype=_DTYPES[header.get_dtype()])
    return found
