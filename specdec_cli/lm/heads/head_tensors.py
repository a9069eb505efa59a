"""The tensors of published drafts, from safetensors or pickled files, under one set of names."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import Tensor

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.draft_formats import DraftFolder
from specdec_cli.lm.files.origin import Origin, fingerprint
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.files.weights_files import check_weights, weights_files
from specdec_cli.lm.heads.published import AGAIN, PublishedDraft

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
        if name != config.ids_tensor and not (value.is_floating_point() and value.itemsize > 1):
            kind = str(value.dtype).removeprefix("torch.")
            message = f"the tensor `{name}` of `{config.name}` holds numbers in `{kind}`, which is not supported"
            raise UsageError(message, "choose a draft with weights in float32, bfloat16 or float16")
        if value.is_floating_point() and not value.isfinite().all():
            raise UsageError(
                f"the tensor `{name}` of `{config.name}` holds numbers that are not finite", "download it again"
            )
    return tensors


def stored_tensors(config: PublishedDraft) -> dict[str, Tensor]:
    """All tensors of a head that it reads, by their common names, as they are stored: mapped from the files.

    Raises:
        RunError: no weights are there, or they cannot be read.
    """
    tensors = {config.common_name(name): value for name, value in _read_beside(config).items()}
    tensors = _stored(type(config), config.name, config.source) | tensors
    return {name: value for name, value in tensors.items() if config.reads(name)}


def head_bytes(config: PublishedDraft, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """Memory of a head's weights, as `read_head_tensors` keeps them.

    Args:
        config: of the head.
        shapes: of its tensors, by common names.
        dtype: that it computes in.
    """
    kinds = {config.ids_tensor: torch.int64}
    return sum(prod(shape) * kinds.get(name, dtype).itemsize for name, shape in shapes.items())


def stored_shapes(kind: type[PublishedDraft], name: str, source: DraftFolder) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in a folder by their common names, before its configuration is read.

    Args:
        kind: the format's configuration.
        name: of the draft, for messages.
        source: the folder; without weights, which may not have been fetched, there are none.

    Raises:
        RunError: they cannot be read.
    """
    if not has_head_weights(source):
        return {}
    return {key: tuple(value.shape) for key, value in _stored(kind, name, source).items()}


def drafted_size(
    kind: type[PublishedDraft], name: str, source: DraftFolder, content: Mapping[str, Any], vocab_size: int
) -> int:
    """Tokens that a head can draft: by its configuration, else by its map `d2t`; all tokens where it has neither.

    Args:
        kind: the format's configuration.
        name: of the draft, for messages.
        source: its folder.
        content: the keys of its configuration.
        vocab_size: of its target.

    Raises:
        RunError: its configuration or its weights cannot be read.
    """
    size = source.whole_number(content, "draft_vocab_size")
    return size or stored_shapes(kind, name, source).get("d2t", (vocab_size,))[0]


def has_head_weights(source: DraftFolder) -> bool:
    """Whether a folder has the weights of its draft."""
    return bool(source.tensors) or any((source.path / file).is_file() for file in source.format.files)


def head_origin(config: PublishedDraft) -> Origin:
    """Where a head's numbers come from, with its files' fingerprint."""
    files = [path.name for path in _files(config.name, config.source)]
    return Origin(config.name, weights=fingerprint((config.folder / "config.json").read_bytes(), config.folder, files))


def _files(name: str, source: DraftFolder) -> list[Path]:
    """The files of a head's weights: under names of the format's own, or as those of a model.

    Raises:
        RunError: there are none, or one is not whole.
    """
    folder = source.path
    own = next((folder / file for file in source.format.files if (folder / file).is_file()), None)
    if own is not None:
        return [own]
    if (folder / _PICKLE).is_file() and not any(folder.glob("*.safetensors")):
        return [folder / _PICKLE]
    check_weights(name, folder)
    return [folder / file for file in weights_files(name, folder)]


def _stored(kind: type[PublishedDraft], name: str, source: DraftFolder) -> dict[str, Tensor]:
    """All tensors of a folder by their common names, mapped from its files.

    Raises:
        RunError: they cannot be read.
        UsageError: one is there under two names, with different numbers.
    """
    stored: dict[str, Tensor] = {}
    for key, value in ((key, value) for path in _files(name, source) for key, value in _read(path).items()):
        common = kind.common_name(key)
        known = stored.setdefault(common, value)
        if known is not value and not (known.dtype == value.dtype and torch.equal(known, value)):
            raise UsageError(f"the draft `{name}` has the tensor `{common}` twice, with different numbers", AGAIN)
    return stored


def _read_beside(config: PublishedDraft) -> dict[str, Tensor]:
    """Tensors of the pickled files that a format has beside its weights; none where there are no such files."""
    start = config.beside
    if start is None:
        return {}
    paths = (config.folder / file for file in config.source.format.beside)
    tensors = (item for path in paths if path.is_file() for item in _read(path).items())
    return {name: value for name, value in tensors if name.startswith(start)}


def _read(path: Path) -> dict[str, Tensor]:
    """Tensors of a file; nothing in a pickled one is run."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except Exception as error:
        raise RunError(f"`{path}` cannot be read: {first_line(error)}", AGAIN) from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise RunError(f"`{path}` holds something else than tensors", AGAIN)
    return content
