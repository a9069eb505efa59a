"""The notebooks of `examples/` run, and their stored outputs are those of a run without an error."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typed import not_none

import specdec_cli

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
HAS_PAIR = (Path(specdec_cli.__file__).parent / "builtin" / "target" / "model.safetensors").is_file()


def runner():
    spec = importlib.util.spec_from_file_location("run_notebook", ROOT / "scripts" / "run_notebook.py")
    module = importlib.util.module_from_spec(not_none(spec))
    not_none(not_none(spec).loader).exec_module(module)
    return module


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def test_there_is_a_notebook() -> None:
    assert [file.name for file in NOTEBOOKS] == ["predict.ipynb"]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_PAIR, reason="the built-in pair is not there")
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_a_notebook_runs(file) -> None:
    out = "".join(runner().run_cells(read(file), file.name))
    assert re.search(r"acceptance rate 0\.\d\d, acceptance length \d\.\d\d", out)
    table = re.findall(r"^(\d)\s+(\d\.\d\d)\s+(\d\.\d\d)$", out, re.MULTILINE)
    assert [int(k) for k, *_ in table] == [1, 2, 4, 6, 8]
    assert all(abs(float(predicted) - float(counted)) < 0.1 for _, predicted, counted in table)
    assert "4 of 4 prompts have the same tokens" in out


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_a_notebook_is_stored_as_it_ran(file) -> None:
    code = [cell for cell in read(file)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        printing = any("print(" in line for line in cell["source"])
        assert [output["output_type"] for output in cell["outputs"]] == ["stream"] * printing


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_a_notebooks_links_lead_somewhere(file) -> None:
    text = "".join("".join(cell["source"]) for cell in read(file)["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^):]+)\)", text)
    assert links
    assert [link for link in links if not (file.parent / link).exists()] == []


def test_a_cell_that_raises_is_no_run() -> None:
    cell = {"cell_type": "code", "source": ["print('a')\n", "1 / 0\n"]}
    with pytest.raises(ZeroDivisionError):
        runner().run_cells({"cells": [cell]}, "bad.ipynb")


def test_outputs_stand_in_their_cells() -> None:
    cells = [
        {"cell_type": kind, "source": [text]}
        for kind, text in [("code", "x = 2"), ("markdown", "b"), ("code", "print(x)")]
    ]
    found = runner()
    done = found.with_outputs({"cells": cells}, found.run_cells({"cells": cells}, "good.ipynb"))["cells"]
    assert done[0]["outputs"] == []
    assert done[2]["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["2\n"]}]
    assert (done[0]["execution_count"], done[2]["execution_count"]) == (1, 2)
