"""Exports run on the embedded pair: what they print is the target's own text."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.cli.main import run
from specdec_cli.cli.shared import draft_methods
from specdec_cli.export import export
from specdec_cli.recipe import resolve

PROMPT = "Once upon a time, there was a little girl named Mia. She had"
PAIR = {
    "target.model": "builtin:target",
    "target.dtype": "float32",
    "sampling.temperature": 0.0,
    "sampling.max_new_tokens": 24,
}


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize(
    "draft",
    [{"method": "none"}, {"model": "builtin:draft", "dtype": "float32"}, {"method": "ngram", "max": 3, "min": 1}],
)
def test_transformers_prints_the_text_of_the_target(
    draft: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = PAIR | {"draft": draft}
    recipe = resolve(flags={path: (value, path) for path, value in given.items()}, methods=draft_methods())
    made, _ = export("transformers", recipe, "X")
    script = tmp_path / "generate.py"
    script.write_text(made.files["generate.py"], encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["generate.py", PROMPT])
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    words = ["-t", "builtin:target", "--draft", "none", "--temperature", "0", "--max-new-tokens", "24", "--quiet"]
    assert run(["generate", PROMPT, *words]) == 0
    assert printed.strip() == capsys.readouterr().out.strip()
