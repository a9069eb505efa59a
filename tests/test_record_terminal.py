"""The terminal pictures in the documentation: the screen that a command leaves, drawn from a real run."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from html import unescape
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("record_terminal", ROOT / "scripts" / "record_terminal.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(svg: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", svg)).replace("\xa0", " ")


def screen(script, output: str, columns: int = 20) -> list[str]:
    terminal = script.Terminal(columns)
    terminal.feed(output)
    return [line.plain for line in terminal.lines()]


def test_a_redrawn_area_leaves_its_last_state(script) -> None:
    assert screen(script, "text\r\nk 1\r\nrate 2\x1b[?25l\r\x1b[2K\x1b[1A\x1b[2Kk 5\r\nrate 9\r\n") == [
        "text",
        "k 5",
        "rate 9",
    ]


def test_long_lines_wrap_and_erased_ends_go(script) -> None:
    assert screen(script, "abcdef", columns=4) == ["abcd", "ef"]
    assert screen(script, "abcdef\rxy\x1b[K") == ["xy"]
    assert screen(script, "a\x1b[9A\r\nb\r\n\r\n") == ["a", "b"]


def test_wide_characters_fill_two_columns(script) -> None:
    assert screen(script, "狗狗狗", columns=5) == ["狗狗", "狗"]
    assert screen(script, "ab🐶c", columns=3) == ["ab", "🐶c"]
    assert screen(script, "狗x\ry", columns=5) == ["y x"], "half of a wide character is none"
    assert screen(script, "e\u0301e\u0301狗\u0301x", columns=5) == ["e\u0301e\u0301狗\u0301x"]


def test_colours_stay_with_their_characters(script) -> None:
    terminal = script.Terminal(20)
    terminal.feed("a\x1b[1;32mbc\x1b[0md")
    (line,) = terminal.lines()
    assert [(span.start, span.end, str(span.style)) for span in line.spans] == [(1, 3, "bold color(2)")]


def test_a_command_is_recorded_in_a_terminal(script, tmp_path: Path) -> None:
    code = "import os, sys; print(sys.stdout.isatty(), os.get_terminal_size().columns); print('\\x1b[31mred\\x1b[0m')"
    assert script.main(["--columns", "70", str(tmp_path / "new" / "a.svg"), sys.executable, "-c", code]) == 0
    svg = (tmp_path / "new" / "a.svg").read_text()
    assert "True 70" in words(svg)
    assert "red" in words(svg)
    assert "@font-face" not in svg, "the picture needs no other host"


def test_a_failing_command_leaves_no_picture(script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([str(tmp_path / "a.svg"), sys.executable, "-c", "import sys; sys.exit('no such model')"]) == 1
    assert "no such model" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=lambda file: file.name)
def test_a_picture_in_the_documentation_stands_alone(file: Path) -> None:
    """A recorded terminal, or the curves that `train-draft --plot` draws."""
    svg = file.read_text(encoding="utf-8")
    said = re.sub(r"\s+", " ", words(svg))
    assert "$ specdec" in said or "specdec train-draft: eagle3 for builtin:target" in said
    assert "@font-face" not in svg
    assert not re.search(r"(href|src)=(?!\"#)|url\((?!#)", svg), "the picture needs no other file"
