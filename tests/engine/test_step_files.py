"""The files that a greedy step of the built-in pair visits, and that nothing below the engine calls it back."""

import sys
from pathlib import Path
from types import FrameType

import pytest

import specdec_cli
from specdec_cli import Engine, SamplingParams

PACKAGE = Path(specdec_cli.__file__).parent


@pytest.mark.skipif(not (PACKAGE / "builtin" / "target" / "model.safetensors").is_file(), reason="no built-in pair")
def test_a_greedy_step_visits_few_files_and_calls_nothing_back() -> None:
    engine = Engine.load(check=False)
    engine.add("Once upon a time", SamplingParams(max_new_tokens=60))
    for _ in range(5):
        engine.step()
    files, depth, back = set[str](), 0, list[str]()

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth
        name, file = frame.f_code.co_name, Path(frame.f_code.co_filename)
        if not file.is_relative_to(PACKAGE) or event not in ("call", "return"):
            return
        inner = str(file.relative_to(PACKAGE))
        files.add(inner)
        if inner == "engine/stepper.py" and name == "run":
            depth += 1 if event == "call" else -1
        elif inner == "engine/engine.py" and depth:
            back.append(name)

    sys.setprofile(look)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    assert "engine/stepper.py" in files
    assert back == []
    assert len(files) <= 27, sorted(files)
