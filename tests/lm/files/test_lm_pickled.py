"""Checkpoints in `pytorch_model.bin`: tensors are read, nothing else is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_tiny

from specdec_cli.errors import RunError
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.load import load_lm

TOKENS = [5, 17, 3, 40, 41, 9]


class Harmful:
    """A pickle of it would run a command."""

    def __reduce__(self):
        return os.mkdir, (str(self.path),)

    def __init__(self, path: Path) -> None:
        self.path = path


def pickled(folder: Path, num_files: int = 1, *, is_old: bool = False, **others: object) -> Path:
    """A tiny checkpoint in as many files."""
    make_tiny("llama", folder)
    weights: dict[str, object] = {**load_file(folder / "model.safetensors"), **others}
    (folder / "model.safetensors").unlink()
    names = [f"pytorch_model-{place + 1:05}-of-{num_files:05}.bin" for place in range(num_files)]
    names = names if num_files > 1 else ["pytorch_model.bin"]
    where = {key: names[place % num_files] for place, key in enumerate(weights)}
    for name in names:
        part = {key: weights[key] for key in weights if where[key] == name}
        torch.save(part, folder / name, _use_new_zipfile_serialization=not is_old)
    if num_files > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.mark.parametrize(("num_files", "is_old"), [(1, False), (1, True), (2, False)])
def test_39_pickled_tensors_are_the_same_model(tmp_path: Path, num_files: int, is_old: bool) -> None:
    right = load_lm(str(make_tiny("llama", tmp_path / "plain"))).score([Row(0, TOKENS, len(TOKENS))])
    folder = pickled(tmp_path / "pickled", num_files, is_old=is_old)
    lm = load_lm(str(folder))
    assert torch.equal(lm.score([Row(0, TOKENS, len(TOKENS))]), right)
    facts = describe(str(folder))
    assert (facts.decoder, facts.stored_as, facts.dtype) == (lm.decoder, "pickled tensors", "float32")


@pytest.mark.parametrize("ask", [load_lm, describe])
def test_39_what_is_no_tensor_is_not_run(tmp_path: Path, ask) -> None:
    folder = pickled(tmp_path / "pickled", harm=Harmful(tmp_path / "harm"))
    with pytest.raises(RunError, match="holds something else than tensors, which is not loaded"):
        ask(str(folder))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("ask", [load_lm, describe])
def test_39_a_truncated_file_is_one_sentence(tmp_path: Path, ask) -> None:
    folder = pickled(tmp_path / "pickled")
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(RunError) as caught:
        ask(str(folder))
    assert "pytorch_model.bin` " in caught.value.message
    assert "\n" not in caught.value.message
