"""Tensors by the headers of safetensors files: names, shapes, dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

_COMPARED_ROWS = 16

_FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def first_dtype(files: list[Path]) -> str | None:
    """The name of the first floating-point dtype in safetensors files; None where there is none."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                name = str(file.get_slice(key).get_dtype())
                if "F" in name:
                    return _FLOATS.get(name, name)
    return None


def read_headers(files: list[Path]) -> dict[str, Tensor]:
    """The tensors of safetensors files by name, on paper; asked within `on_paper`."""
    found = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                header = file.get_slice(key)
                found[key] = torch.empty(header.get_shape(), dtype=_DTYPES[header.get_dtype()])
    return found


def read_tensors(files: list[Path]) -> dict[str, Tensor]:
    """The tensors of safetensors files by name, mapped from the files."""
    found: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    return found


def differing(files: list[Path], pairs: Mapping[str, str], dtype: torch.dtype) -> list[str]:
    """Tensors whose first rows hold other numbers than those they are tied to, where the files hold both.

    A few rows tell: an output layer of its own differs from the embedding in the first, and a copy does nowhere.

    Args:
        files: safetensors files.
        pairs: names of tied tensors and of what each is tied to.
        dtype: in which they are compared, as they would be loaded.
    """
    rows: dict[str, Tensor] = {}
    wanted = {*pairs, *pairs.values()}
    with unset_fake_temporarily():
        for path in files:
            with safe_open(path, framework="pt") as file:
                rows |= {key: file.get_slice(key)[:_COMPARED_ROWS].to(dtype) for key in wanted & set(file.keys())}
        both = [(one, other) for one, other in pairs.items() if one in rows and other in rows]
        return [one for one, other in both if not torch.equal(rows[one], rows[other])]
