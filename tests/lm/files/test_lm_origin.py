"""Fingerprints of checkpoints: the same wherever they lie, another where any tensor is another."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from typed import stand_in

from specdec_cli.lm.files.origin import Origin, fingerprint
from specdec_cli.lm.load import load_lm
from specdec_cli.measure.audit.table import TableLM

FILES = ["model.safetensors"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return make_tiny("llama", tmp_path_factory.mktemp("models") / "tiny")


def _fingerprint(folder: Path) -> str:
    return fingerprint((folder / "config.json").read_bytes(), folder, FILES)


def test_a_copy_is_the_same_and_any_changed_tensor_another(folder, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    was = _fingerprint(folder)
    assert _fingerprint(copy) == was
    tensors = load_file(copy / FILES[0])
    for name in tensors:
        changed = {n: t * 1.01 if n == name else t for n, t in tensors.items()}
        save_file(changed, copy / FILES[0], metadata={"format": "pt"})
        assert (copy / FILES[0]).stat().st_size == (folder / FILES[0]).stat().st_size
        assert _fingerprint(copy) != was, name
    shutil.copy(folder / FILES[0], copy)
    (copy / "config.json").write_text((folder / "config.json").read_text().replace("1e-06", "1e-05"))
    assert _fingerprint(copy) != was


def test_dtype_and_packing_change_no_fingerprint(folder) -> None:
    plain, bfloat16, int8 = (
        load_lm(str(folder), **stand_in(how)).origin for how in ({}, {"dtype": "bfloat16"}, {"quantize": "int8"})
    )
    assert plain.weights == bfloat16.weights == int8.weights == _fingerprint(folder)
    assert (plain.dtype, bfloat16.dtype, int8.quantize) == ("float32", "bfloat16", "int8")
    assert plain.has_weights_of(int8)
    assert not plain.computes_as(int8)
    assert not plain.computes_as(bfloat16)


def test_without_files_the_last_part_of_the_name_tells(folder) -> None:
    table = TableLM.random(8, name="some/table").origin
    assert table == Origin("some/table")
    assert table.has_weights_of(Origin("other/table"))
    assert not table.has_weights_of(Origin("some/other"))
    assert load_lm(str(folder), load_format="dummy").origin.weights is None
