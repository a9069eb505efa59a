"""GGUF files of real models, which `scripts/real_models.py` fetches; tests skip where one is not there."""

import runpy
from pathlib import Path

import pytest

QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
SMOLLM = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = "gemma-3-270m-q4_k_m.gguf"
_SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "real_models.py"))


def real_file(name: str) -> str:
    path = Path(_SCRIPT["default_folder"](), name)
    if not path.exists():
        pytest.skip(f"`{name}` is not there: `python scripts/real_models.py` fetches it to {path.parent}")
    return str(path)
