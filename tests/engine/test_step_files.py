"""The files, functions and changes of file of a greedy step; nothing below the engine calls it back."""

import sys
from pathlib import Path
from types import FrameType

import pytest

import specdec_cli
from specdec_cli import Engine, SamplingParams

PACKAGE = Path(specdec_cli.__file__).parent


@pytest.mark.skipif(not (PACKAGE / "builtin" / "target" / "model.safetensors").is_file(), reason="no built-in pair")
def test_a_greedy_step_fits_on_a_screen_and_calls_nothing_back() -> None:
    engine = Engine.load(check=False)
    engine.add("Once upon a time", SamplingParams(max_new_tokens=60))
    for _ in range(5):
        engine.step()
    functions, path, num_changes, depth, back = set[tuple[str, str]](), [""], 0, 0, list[str]()

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth, num_changes
        name, file = frame.f_code.co_qualname, Path(frame.f_code.co_filename)
        if not file.is_relative_to(PACKAGE) or event not in ("call", "return"):
            return
        inner = str(file.relative_to(PACKAGE))
        if event == "return":
            path.pop()
        else:
            num_changes += path[-1] not in ("", inner)
            path.append(inner)
            if not name.endswith(">"):  # comprehensions are functions in some versions of Python
                functions.add((inner, name))
        if inner == "engine/stepper.py" and name == "Stepper.run":
            depth += 1 if event == "call" else -1
        elif inner == "engine/engine.py" and depth:
            back.append(name)

    sys.setprofile(look)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    files = {file for file, _ in functions}
    assert "engine/stepper.py" in files
    assert back == []
    assert len(files) <= 20, sorted(files)
    assert len(functions) <= 117, sorted(functions)  # 114, and three more where other processes want the cores
    assert num_changes <= 92
