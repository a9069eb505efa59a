"""Folders of trained drafts on disk: configuration and safetensors, written so that a reader never sees half of one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from specdec_cli.train.disk import writing


def write_draft(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = "model.safetensors"
) -> None:
    """Write `config.json` and the file of weights.

    Args:
        folder: exists.
        config: of the draft.
        tensors: by published names.
        file: of weights, as the format names it.

    Raises:
        RunError: the disk is full, or the folder cannot be written.
    """
    with writing(folder):
        weights, named = folder / f"{file}.new", folder / "config.json.new"
        save_file({name: one.cpu().contiguous() for name, one in tensors.items()}, weights, {"format": "pt"})
        named.write_text(json.dumps(dict(config), indent=2, default=str) + "\n", encoding="utf-8")
        weights.replace(folder / file)
        named.replace(folder / "config.json")
