"""Shell completion: commands, options, recipes, drafts, data sets and listed values, quickly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_cli.cli import completion, main
from specdec_cli.cli.commands import COMMANDS
from specdec_cli.drafters import without_model
from specdec_cli.measure.workload.dataset import PRESETS
from specdec_cli.recipe import shipped


def completed(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What bash offers after this line; the last word is being typed."""
    monkeypatch.setenv("_SPECDEC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    with pytest.raises(SystemExit) as caught:
        main.run([])
    assert not caught.value.code
    return capsys.readouterr().out.split()


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("models--meta--Llama-3", "models--gpt2", "datasets--openai--gsm8k", "version.txt"):
        (tmp_path / "hub" / name).mkdir(parents=True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("specdec ", set(COMMANDS)),
        ("specdec s", {"serve", "sweep-k"}),
        ("specdec --vers", {"--version"}),
        ("specdec recipe ", {"list", "show", "copy", "validate", "schema"}),
        ("specdec generate --comp", {"--compare", "--compute"}),
        ("specdec generate --help", {"--help", "--help-all"}),
        ("specdec generate -r ", {one.name for one in shipped.list_recipes()}),
        ("specdec sweep-k --recipe builtin-n", {"builtin-ngram"}),
        ("specdec recipe show published-qwen", {"published-qwen2-72b-0.5b"}),
        ("specdec recipe copy qw", {"qwen3-8b"}),
        ("specdec generate -d ", {"builtin:draft", *without_model(), "meta/Llama-3", "gpt2"}),
        ("specdec generate -d n", {"ngram", "none"}),
        ("specdec compare-drafts -d ng", {"ngram"}),
        ("specdec serve --speculative-model pred", {"prediction"}),
        ("specdec generate -t ", {"builtin:target", "meta/Llama-3", "gpt2"}),
        ("specdec serve gp", {"gpt2"}),
        ("specdec bench --dataset ", {"builtin:mini", "builtin:stories", *PRESETS, "openai/gsm8k"}),
        ("specdec generate --dtype ", {"auto", "float32", "bfloat16", "float16"}),
        ("specdec serve --log-format j", {"json"}),
        ("specdec serve --generation-config ", {"auto", "none"}),
        ("specdec generate -r nothing-begins-so", set()),
    ],
)
def test_what_is_offered(
    line: str, offered: set[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(completed(line, capsys, monkeypatch)) == offered


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize(
    "line", ["specdec ", "specdec generate -r ", "specdec generate -d ", "specdec bench --dataset "]
)
def test_completion_loads_nothing_heavy(line: str) -> None:
    code = (
        "import atexit, sys; from specdec_cli.cli.main import run\n"
        "heavy = lambda: {'torch', 'transformers', 'datasets', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "atexit.register(lambda: print('LOADED', heavy()) if heavy() else None)\n"
        "run([])"
    )
    variables = {"_SPECDEC_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | variables, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()
    assert "LOADED" not in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_SPECDEC_COMPLETE", f"source_{shell}")
    with pytest.raises(SystemExit):
        main.run([])
    assert "_SPECDEC_COMPLETE" in capsys.readouterr().out


def test_installing_and_showing_are_options_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert "--install-completion" in out
    assert "--show-completion" in out


def test_values_of_a_name_that_is_no_list_are_not_offered() -> None:
    assert completion.choices("auto|none|DIR")("") == [("auto", ""), ("none", "")]
