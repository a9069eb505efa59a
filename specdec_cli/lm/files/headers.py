"""Tensors in the files of a checkpoint: names, shapes and dtypes by their headers, and the numbers."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from specdec_cli.errors import RunError
from specdec_cli.lm.files.reading import first_line

_COMPARED_ROWS = 16

_FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def is_pickled(file: str | Path) -> bool:
    """Whether a file of weights is one that `torch.save` wrote."""
    return Path(file).suffix == ".bin"


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that `torch.save` wrote, by name; nothing in it is run.

    torch reads it with `weights_only`, which takes tensors and plain values and refuses everything else.

    Raises:
        RunError: it is broken, or holds something else than tensors.
    """
    hint = "copy the file again, or give a checkpoint in safetensors"
    try:
        with unset_fake_temporarily():
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise RunError(f"`{path}` holds something else than tensors, which is not loaded", hint) from error
    except Exception as error:
        raise RunError(f"`{path}` is not a whole file of pickled tensors: {first_line(error)}", hint) from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise RunError(f"`{path}` holds something else than tensors, which is not loaded", hint)
    return tensors


def tensor_dtypes(path: Path) -> Iterator[tuple[str, str]]:
    """Names of a file's tensors, and of their dtypes as safetensors writes them."""
    if is_pickled(path):
        names = {dtype: name for name, dtype in _DTYPES.items()}
        yield from ((key, names[tensor.dtype]) for key, tensor in read_pickle(path).items())
        return
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (no mapping)
            yield key, str(file.get_slice(key).get_dtype())


def first_dtype(files: list[Path]) -> str | None:
    """The name of the first floating-point dtype in files of weights; None where there is none."""
    for path in files:
        for _, name in tensor_dtypes(path):
            if "F" in name:
                return _FLOATS.get(name, name)
    return None


def read_headers(files: list[Path]) -> dict[str, Tensor]:
    """The tensors of files of weights by name, as fake tensors; asked within `fake_tensors`."""
    tensors: dict[str, Tensor] = {}
    for path in files:
        if is_pickled(path):
            tensors |= {key: torch.empty(tensor.shape, dtype=tensor.dtype) for key, tensor in read_pickle(path).items()}
            continue
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                header = file.get_slice(key)
                tensors[key] = torch.empty(header.get_shape(), dtype=_DTYPES[header.get_dtype()])
    return tensors


def read_tensors(files: list[Path], wanted: Container[str] | None = None) -> dict[str, Tensor]:
    """The tensors of files of weights by name, mapped from the files; None wants all."""
    tensors: dict[str, Tensor] = {}
    for path in files:
        if is_pickled(path):
            tensors |= {key: tensor for key, tensor in read_pickle(path).items() if wanted is None or key in wanted}
            continue
        with safe_open(path, framework="pt") as file:
            keys = [key for key in file.keys() if wanted is None or key in wanted]  # noqa: SIM118 (no mapping)
            tensors |= {key: file.get_tensor(key) for key in keys}
    return tensors


def not_finite(path: Path) -> str | None:
    """The first tensor of a file with an infinite number or a NaN; None where all numbers are finite."""
    for key, tensor in read_tensors([path]).items():
        has_numbers = tensor.is_floating_point() and tensor.itemsize > 1  # scales of smaller ones are tensors, too
        if has_numbers and not bool(tensor.sum(dtype=torch.float32).isfinite() or tensor.isfinite().all()):
            return key
    return None


def differing(files: list[Path], pairs: Mapping[str, str], dtype: torch.dtype) -> list[str]:
    """Tensors whose first rows hold other numbers than those they are tied to, where the files hold both.

    A few rows tell: an output layer of its own differs from the embedding in the first, and a copy does nowhere.

    Args:
        files: safetensors files.
        pairs: names of tied tensors and of what each is tied to.
        dtype: in which they are compared, as they would be loaded.
    """
    with unset_fake_temporarily():
        mapped = read_tensors(files, {*pairs, *pairs.values()})
        rows = {key: tensor[:_COMPARED_ROWS].to(dtype) for key, tensor in mapped.items()}
        both = [(name, other) for name, other in pairs.items() if name in rows and other in rows]
        return [name for name, other in both if not torch.equal(rows[name], rows[other])]
