"""The tensors of published drafts, from safetensors or pickled files, under one set of names."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.contents import tensor_names
from specdec_cli.lm.files.origin import Origin, fingerprint
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.files.weights_files import check_weights, weights_files
from specdec_cli.lm.heads.published import PublishedDraft

_IDS = ("d2t", "token_map")
_PICKLE = "pytorch_model.bin"


def read_head_tensors(config: PublishedDraft, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """All tensors of a head that it reads, by their common names: numbers in a dtype, ids in int64.

    Raises:
        RunError: no weights are there, or they cannot be read.
        UsageError: one is not a finite number, or weights are in a format of one byte or in whole numbers.
    """
    tensors = finite_tensors(config)
    return {
        name: value.to(device, dtype if value.is_floating_point() else torch.int64) for name, value in tensors.items()
    }


def finite_tensors(config: PublishedDraft) -> dict[str, Tensor]:
    """All tensors of a head that it reads, by their common names, as they are stored.

    Raises:
        RunError: no weights are there, or they cannot be read.
        UsageError: one is not a finite number, or weights are in a format of one byte or in whole numbers.
    """
    tensors = stored_tensors(config)
    for name, value in tensors.items():
        if name not in _IDS and not (value.is_floating_point() and value.itemsize > 1):
            kind = str(value.dtype).removeprefix("torch.")
            said = f"the tensor `{name}` of `{config.name}` holds numbers in `{kind}`, which is not supported"
            raise UsageError(said, "choose a draft with weights in float32, bfloat16 or float16")
        if value.is_floating_point() and not value.isfinite().all():
            raise UsageError(
                f"the tensor `{name}` of `{config.name}` holds numbers that are not finite", "download it again"
            )
    return tensors


def stored_tensors(config: PublishedDraft) -> dict[str, Tensor]:
    """All tensors of a head that it reads, by their common names, as they are stored.

    Raises:
        RunError: no weights are there, or they cannot be read.
    """
    found: dict[str, Tensor] = {}
    for path in _files(config, config.name, config.folder):
        found |= _read(path)
    found |= _read_beside(config)
    tensors = {config.common_name(name): value for name, value in found.items()}
    return {name: value for name, value in tensors.items() if config.reads(name)}


def head_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """Memory of a head's weights, as `read_head_tensors` keeps them.

    Args:
        shapes: of its tensors, by common names.
        dtype: that it computes in.
    """
    return sum(prod(shape) * (torch.int64 if name in _IDS else dtype).itemsize for name, shape in shapes.items())


def read_head_shapes(config: PublishedDraft) -> dict[str, tuple[int, ...]]:
    """The shapes of a head's tensors that it reads by their common names; of safetensors only headers are read.

    Raises:
        RunError: no weights are there, or they cannot be read.
    """
    shapes = _shapes(config, config.name, config.folder)
    shapes |= {config.common_name(name): tuple(one.shape) for name, one in _read_beside(config).items()}
    return {name: shape for name, shape in shapes.items() if config.reads(name)}


def stored_shapes(kind: type[PublishedDraft], name: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in a folder by their common names, before its configuration is read.

    Args:
        kind: the format's configuration.
        name: of the draft, for messages.
        folder: where it is; without weights, which may not have been fetched, there are none.

    Raises:
        RunError: they cannot be read.
    """
    return _shapes(kind, name, folder) if has_head_weights(kind, folder) else {}


def drafted_size(
    kind: type[PublishedDraft], name: str, folder: Path, content: Mapping[str, Any], vocab_size: int
) -> int:
    """Tokens that a head can draft: by its configuration, else by its map `d2t`; all tokens where it has neither.

    Raises:
        RunError: its weights cannot be read.
    """
    if content.get("draft_vocab_size"):
        return int(content["draft_vocab_size"])
    return stored_shapes(kind, name, folder).get("d2t", (vocab_size,))[0]


def has_head_weights(kind: type[PublishedDraft], folder: Path) -> bool:
    """Whether a folder has the weights of a draft of a format."""
    return bool(tensor_names(folder)) or any((folder / file).is_file() for file in kind.own_files)


def head_origin(config: PublishedDraft) -> Origin:
    """Where a head's numbers come from, with its files' fingerprint."""
    files = [path.name for path in _files(config, config.name, config.folder)]
    return Origin(config.name, weights=fingerprint(config.folder, files))


def _files(kind: PublishedDraft | type[PublishedDraft], name: str, folder: Path) -> list[Path]:
    """The files of a head's weights: under names of the format's own, or as those of a model.

    Raises:
        RunError: there are none, or one is not whole.
    """
    own = next((folder / file for file in kind.own_files if (folder / file).is_file()), None)
    if own is not None:
        return [own]
    if (folder / _PICKLE).is_file() and not any(folder.glob("*.safetensors")):
        return [folder / _PICKLE]
    check_weights(name, folder)
    return [folder / file for file in weights_files(name, folder)]


def _shapes(kind: PublishedDraft | type[PublishedDraft], name: str, folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _files(kind, name, folder):
        if path.suffix != ".safetensors":
            shapes |= {kind.common_name(key): tuple(one.shape) for key, one in _read_pickle(path).items()}
            continue
        with _opened(path) as file:
            names = file.keys()
            shapes |= {kind.common_name(key): tuple(file.get_slice(key).get_shape()) for key in names}
    return shapes


def _read_beside(config: PublishedDraft) -> dict[str, Tensor]:
    """Tensors of the pickled file that a format has beside its weights; none where there is no such file."""
    file, start = config.beside
    if not file or not (config.folder / file).is_file():
        return {}
    found = _read_pickle(config.folder / file)
    return {name: value for name, value in found.items() if name.startswith(start)}


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix != ".safetensors":
        return _read_pickle(path)
    with _opened(path) as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise RunError(f"`{path}` cannot be read: {first_line(error)}", "copy or download the draft again") from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors of a pickled file; nothing in it is run."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except Exception as error:
        raise RunError(f"`{path}` cannot be read: {first_line(error)}", "copy or download the draft again") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise RunError(f"`{path}` holds something else than tensors", "copy or download the draft again")
    return found
