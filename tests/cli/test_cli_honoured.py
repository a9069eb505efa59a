"""Options where a command's work is done elsewhere: one table says which of them have an effect there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specdec_cli.cli.honoured import PLACES
from specdec_cli.cli.main import run
from specdec_cli.cli.options import every_option

URL = "http://127.0.0.1:9"
ELSEWHERE = {
    "bench on a server": ["bench", "--endpoint", URL],
    "bench on an engine": ["bench", "--engine", "vllm"],
    "compare-drafts on an engine": ["compare-drafts", "--engine", "vllm", "-d", "builtin:draft", "-d", "ngram"],
    "sweep-k on an engine": ["sweep-k", "--engine", "vllm"],
    "sweep-k through a server": ["sweep-k", "--target-endpoint", URL, "-d", "ngram"],
    "generate on an engine": ["generate", "--engine", "vllm"],
}


@pytest.mark.parametrize("command", ELSEWHERE)
def test_a_prompt_file_has_an_effect_everywhere(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two\nthree four\n")
    assert run([*ELSEWHERE[command], "--prompt-file", str(prompts), "--dry-run"]) == 0, capsys.readouterr().err
    assert "2 prompts" in capsys.readouterr().out or "sweep-k" in command


def test_gates_of_a_recipe_are_refused_where_no_document_has_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text('gates: {fail_if: ["recommended.k < 1"]}\n')
    assert run([*ELSEWHERE["sweep-k through a server"], "--recipe", str(recipe), "--dry-run"]) == 2
    assert "`--fail-if` has no effect with --" in capsys.readouterr().err


def test_the_table_names_options_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """A renamed option cannot leave its old name behind."""
    paths = {option.path for option in every_option()}
    sections = {f"{path.partition('.')[0]}." for path in paths}
    for command in dict.fromkeys(command for command, _ in PLACES):
        run([command, "--help-all"])
    flags = capsys.readouterr().out
    for place, honoured in PLACES.items():
        for name in (*honoured.only, *honoured.refused):
            is_flag = f"--{name.replace('_', '-')}" in flags or name == "at_a_time"
            assert name in paths | sections or is_flag, (place, name)


@pytest.mark.slow
def test_a_local_run_imports_nothing_about_other_engines() -> None:
    code = (
        "import sys; from specdec_cli.cli.main import run; code = run(['generate', 'Hi', '-n', '1', '--quiet']); "
        "mine = [name for name in sys.modules if name.startswith('specdec_cli.')]; "
        "elsewhere = ('specdec_cli.export', 'specdec_cli.measure.elsewhere', 'specdec_cli.measure.endpoint', "
        "'specdec_cli.measure.bench'); "
        "sys.exit(', '.join(name for name in mine if name.startswith(elsewhere)) or code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
