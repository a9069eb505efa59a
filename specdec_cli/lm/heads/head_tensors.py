"""The tensors of published drafts, from safetensors or pickled files, under one set of names."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.origin import Origin, fingerprint
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.files.weights_files import check_weights, weights_files
from specdec_cli.lm.heads.published import PublishedDraft

NOT_READ = ("t2d", "rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")
"""Tensors of published heads that say nothing new."""
_IDS = ("d2t",)
_PICKLE = "pytorch_model.bin"


def read_head_tensors(config: PublishedDraft, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """All tensors of a head that it reads, by their common names: numbers in a dtype, ids in int64.

    Raises:
        RunError: no weights are there, or they cannot be read.
        UsageError: one is not a finite number.
    """
    found = _read_safetensors(config) if not _is_pickled(config.folder) else _read_pickle(config.folder / _PICKLE)
    found |= _read_beside(config)
    tensors = {config.common_name(name): value for name, value in found.items()}
    for name, value in tensors.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise UsageError(
                f"the tensor `{name}` of `{config.name}` holds numbers that are not finite", "download it again"
            )
    return {
        name: value.to(device, dtype if value.is_floating_point() else torch.int64)
        for name, value in tensors.items()
        if name not in NOT_READ
    }


def head_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """Memory of a head's weights, as `read_head_tensors` keeps them.

    Args:
        shapes: of its tensors, by common names.
        dtype: that it computes in.
    """
    read = {name: prod(shape) for name, shape in shapes.items() if name not in NOT_READ}
    return sum(num * (torch.int64 if name in _IDS else dtype).itemsize for name, num in read.items())


def read_head_shapes(config: PublishedDraft) -> dict[str, tuple[int, ...]]:
    """The shapes of a head's tensors by their common names; of safetensors only headers are read.

    Raises:
        RunError: no weights are there, or they cannot be read.
    """
    if _is_pickled(config.folder):
        pickled = _read_pickle(config.folder / _PICKLE)
        return {config.common_name(name): tuple(value.shape) for name, value in pickled.items()}
    check_weights(config.name, config.folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weights_files(config.name, config.folder):
        with safe_open(config.folder / file, framework="pt") as opened:
            names = opened.keys()
            shapes |= {config.common_name(name): tuple(opened.get_slice(name).get_shape()) for name in names}
    return shapes | {config.common_name(name): tuple(one.shape) for name, one in _read_beside(config).items()}


def _read_beside(config: PublishedDraft) -> dict[str, Tensor]:
    """Tensors of the pickled file that a format has beside its weights; none where there is no such file."""
    file, start = config.beside
    if not file or not (config.folder / file).is_file():
        return {}
    found = _read_pickle(config.folder / file)
    return {name: value for name, value in found.items() if name.startswith(start)}


def head_origin(config: PublishedDraft) -> Origin:
    """Where a head's numbers come from, with its files' fingerprint."""
    files = [_PICKLE] if _is_pickled(config.folder) else weights_files(config.name, config.folder)
    return Origin(config.name, weights=fingerprint(config.folder, files))


def _is_pickled(folder: Path) -> bool:
    return (folder / _PICKLE).is_file() and not any(folder.glob("*.safetensors"))


def _read_safetensors(config: PublishedDraft) -> dict[str, Tensor]:
    check_weights(config.name, config.folder)
    found: dict[str, Tensor] = {}
    for file in weights_files(config.name, config.folder):
        with safe_open(config.folder / file, framework="pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
    return found


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors of a pickled file; nothing in it is run."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RunError(f"`{path}` cannot be read: {first_line(error)}", "copy or download the draft again") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise RunError(f"`{path}` holds something else than tensors", "copy or download the draft again")
    return found
