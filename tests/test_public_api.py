"""The README's lines of Python do what they say, with the pair that comes with the package."""

import re
from pathlib import Path

import pytest

import specdec_cli

ROOT = Path(__file__).parents[1]
BUILTIN = Path(specdec_cli.__file__).parent / "builtin"


@pytest.mark.skipif(not (BUILTIN / "target" / "model.safetensors").is_file(), reason="the built-in pair is not there")
def test_the_readmes_lines_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks, "the README shows Python"
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 10


def test_dir_lists_the_api() -> None:
    listed = {name for name in dir(specdec_cli) if not name.startswith("__")}
    assert listed == {name for name in specdec_cli.__all__ if not name.startswith("__")}
    assert {"Engine", "SamplingParams"} <= listed
    assert all(getattr(specdec_cli, name) is not None for name in listed)


def test_public_names_are_documented() -> None:
    for name in specdec_cli.__all__:
        if not name.startswith("__"):
            assert getattr(specdec_cli, name).__doc__
    with pytest.raises(AttributeError, match="Motor"):
        _ = specdec_cli.Motor
