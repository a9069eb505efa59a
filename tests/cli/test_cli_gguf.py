"""A GGUF file as the target of every command that loads one, with the options and keys that each of them takes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny

from specdec_cli.cli.main import run

pytest.importorskip("gguf", reason="needs gguf")

from tiny_gguf import SIZES, write_gguf

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if thinking %}<t>{% endif %}[bot]"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A target whose blocks are computed on, a chat template of its own and a variable for it."""
    folder = tmp_path_factory.mktemp("gguf")
    sizes: dict[str, Any] = SIZES | {"num_hidden_layers": 3, "max_position_embeddings": 512}
    write_gguf(make_tiny("qwen2", folder / "source", **sizes), folder / "tiny.gguf", "Q4_0")
    (folder / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    rows = "\n".join(json.dumps({"prompt": f"the hare and the rabbit {number}"}) for number in range(12))
    (folder / "prompts.jsonl").write_text(rows, encoding="utf-8")
    template = ["--chat-template", str(folder / "template.jinja")]
    variable = ["--set", "target.default_chat_template_kwargs={thinking: true}"]
    return [
        "-t",
        str(folder / "tiny.gguf"),
        *template,
        *variable,
        "--compute",
        "native",
        "--dtype",
        "float32",
        "--quiet",
    ]


def prompts(options: list[str]) -> list[str]:
    return ["--prompt-file", str(Path(options[1]).with_name("prompts.jsonl")), "--num-prompts", "2"]


COMMANDS: dict[str, list[str]] = {
    "generate": ["-d", "ngram", "--chat", "--json"],
    "bench": ["-d", "ngram", "--chat", "--repeats", "1", "--json"],
    "sweep-k": ["-d", "ngram", "--chat", "--k-max", "2", "--json"],
    "compare-drafts": ["-d", "ngram", "-d", "self-exit:1", "--chat", "--repeats", "1", "--json"],
    "train-draft": ["--method", "eagle3", "--chat", "--max-steps", "1", "--num-held-out", "1", "--json"],
}


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("command", COMMANDS)
def test_49_12_a_command_decodes_it(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    arguments = [command, *COMMANDS[command], *options, *prompts(options), "-n", "6"]
    if command == "train-draft":
        arguments = [*arguments, "--output", str(tmp_path / "head")]
    assert run([*arguments, *(["--dry-run"] if command != "generate" else [])]) == 0
    capsys.readouterr()
    assert run(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recipe"]["target"]["default_chat_template_kwargs"] == {"thinking": True}
    assert document["recipe"]["target"]["compute"] == "native"


def test_49_12_a_conversation_and_the_preflight_take_it(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the hare\n"))
    assert run(["chat", *options, "-d", "ngram", "-n", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["turns"][0]["completion_tokens"] == 4
    assert run(["doctor", *options, "-d", "ngram", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pair"]["target"]["decoder"] == "own, native"
    assert run(["serve", *options, "-d", "ngram", "--dry-run"]) == 0


@pytest.mark.parametrize("command", [*COMMANDS, "chat", "serve", "doctor", "audit"])
def test_49_12_what_none_of_them_can_do_is_refused_by_name(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Blocks cannot be quantized again."""
    arguments = [command, "-t", options[1], "--compute", "native", "--quantize", "int8", "-d", "ngram"]
    if command == "train-draft":
        arguments = [*arguments[:-2], "--data", "builtin:stories", "--output", str(tmp_path / "head")]
    if command == "generate":
        arguments.append("the")
    for more in ([], *([["--dry-run"]] if command in (*COMMANDS, "serve") else [])):
        assert run([*arguments, *more]) == 2
        said = capsys.readouterr()
        assert "its weights are to be quantized again, to int8" in " ".join((said.out + said.err).split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compute", "imported"),
    [("auto", []), ("dequantized", ["auto.modeling_auto", "qwen2.modeling_qwen2"])],
)
def test_49_23_the_preflight_imports_its_familys_model_alone(
    options: list[str], compute: str, imported: list[str]
) -> None:
    """transformers' class of its configuration imports the compiler by itself; for blocks, it is not needed."""
    script = (
        "import sys; from specdec_cli.cli.main import run; code = run(sys.argv[1:]); "
        "print([name for name in sys.modules if '.models.' in name and 'modeling_' in name], code, file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, "doctor", *options, "-d", "ngram", "--json"]
    done = subprocess.run([*command, "--compute", compute], capture_output=True, text=True, check=True)
    names = [f"transformers.models.{name}" for name in imported]
    assert done.stderr.splitlines()[-1] == f"{names} 0", done.stderr


def test_51_the_preflight_takes_the_file_alone(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", options[1], "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["pair"]["target"]["decoder"] == "own, native"
    assert run(["doctor", options[1], "-t", options[1]]) == 2
    assert "two models are named" in capsys.readouterr().err
