"""Each engine's own parser reads our exports; `SPECDEC_PYTHON_VLLM=/opt/vllm/bin/python` says where its package is."""

import importlib.util
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from export_recipes import CASES, RECIPES

SCRIPTS = Path(__file__).parents[2] / "scripts"
OURS, THEIRS = (runpy.run_path(str(SCRIPTS / f"{name}.py")) for name in ("check_exports", "engine_parsers"))
PARSERS: dict[str, Any] = THEIRS["PARSERS"]


def python_of(engine: str) -> str:
    """The Python that has the engine's packages; skips the test where none has."""
    variable = f"SPECDEC_PYTHON_{engine.replace('-', '_').upper()}"
    found = os.environ.get(variable)
    if found is not None:
        return found
    if engine == "llamacpp" and shutil.which("llama-server") is None:
        pytest.skip("needs `llama-server` on PATH")
    missing = [name for name in PARSERS[engine][1] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}; {variable} names a Python that has it")
    return sys.executable


@pytest.mark.slow
@pytest.mark.parametrize("engine", PARSERS)
def test_the_engines_own_parser_takes_every_export(engine: str) -> None:
    found = OURS["check"](engine, python_of(engine))
    assert set(found["results"]) == {*RECIPES, *CASES}
    assert not {name: reason for name, reason in found["results"].items() if reason is not None}, found["version"]


def test_exports_name_local_models_for_the_parsers(tmp_path: Path) -> None:
    OURS["write_exports"]("vllm", tmp_path)
    words = THEIRS["command"](tmp_path / "exports" / "sampled" / "vllm.sh")
    assert json.loads((Path(words[2]) / "config.json").read_text())["model_type"] == "qwen3"
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert (Path(speculative["model"]) / "tokenizer.json").is_file()


def test_a_refusal_is_reported_with_its_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(folder: Path) -> None:
        if folder.name == "wrong":
            raise ValueError("unknown option --k")

    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    monkeypatch.setitem(PARSERS, "vllm", (refuses, ("json",)))
    found: dict[str, Any] = THEIRS["main"]("vllm", tmp_path)
    assert found["results"] == {"right": None, "wrong": "ValueError: unknown option --k"}
