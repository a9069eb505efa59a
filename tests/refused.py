"""Checkpoints that are not as they should be, and the one error that loading and the doctor raise for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec_cli.errors import SpecdecError
from specdec_cli.lm.facts import describe
from specdec_cli.lm.load import load_lm


def refusals(name: str | Path, *asks: Callable[..., Any], **options: Any) -> list[SpecdecError]:
    """The errors of loading and of the doctor, or of other ways to ask: one sentence each, and a hint."""
    said = []
    for ask in asks or (load_lm, describe):
        with pytest.raises(SpecdecError) as caught:
            ask(str(name), **options)
        assert "\n" not in caught.value.message
        assert caught.value.hint
        said.append(caught.value)
    return said


def refusal(name: str | Path, *asks: Callable[..., Any], **options: Any) -> SpecdecError:
    """The error that all of them raise."""
    said = refusals(name, *asks, **options)
    assert len({(type(one), one.message, one.hint) for one in said}) == 1, said
    return said[0]


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of a checkpoint's configuration."""
    edit(folder / "config.json", **changes)


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change a checkpoint's tensors."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
