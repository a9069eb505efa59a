"""The commands of the documentation run: each with `--dry-run`, and, marked slow, page by page with few prompts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_docs import command_lines
from test_readme import program, words_of

import specdec_cli
from specdec_cli.cli import main
from specdec_cli.errors import ExitCode

DOCS = Path(__file__).parents[1] / "docs"
HAS_PAIR = (Path(specdec_cli.__file__).parent / "builtin" / "target" / "model.safetensors").is_file()
MODELS = re.compile(r"\./[\w.-]+(:[\w.-]+)?|\b\w+/[\w.-]+(:[\w.-]+)?")
"""Folders, files and hub ids that only a reader has."""
OF_TARGET = ("-t", "--target", "--model", "serve")
OF_DRAFT = ("-d", "--draft", "--speculative-model", "--speculative-config")
FILES = {
    "prompts.jsonl": "".join(f'{{"prompt": "Once upon a time, {place} cats"}}\n' for place in range(20)),
    "chats.jsonl": "".join(
        f'{{"messages": [{{"role": "user", "content": "Tell me a story of {place} cats."}}]}}\n' for place in range(20)
    ),
    "questions.csv": "query,topic\nThe dog,animals\n,nothing\nThe cat,animals\n",
    "person.json": '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}',
    "tuned.yaml": "target: {model: builtin:target}\ndraft: {model: builtin:draft}\n",
    "gated.yaml": "draft: {model: builtin:draft}\ngates: {fail_if: ['lossless.mismatches > 0']}\n",
    "ngram.yaml": "target: {model: builtin:target}\ndraft: {method: ngram}\n",
    "main.json": '{"schema": "specdec.bench/1", "speedup": {"decode": {"median": 1.5, "ci95": [1.4, 1.6]}}}',
    "mine.yaml": "target: {model: builtin:target}\n",
    "models.yaml": "small: builtin\nlarge: ./tuned.yaml\n",
    "requests.jsonl": '{"prompt": "Once upon a time", "answer": " there was a cat and a cat and a cat."}\n' * 4,
}
MEASURES = ("bench", "sweep-k", "compare-drafts")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECDEC_API_KEY", raising=False)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def words(line: str) -> list[str]:
    """The line's words with the built-in pair in place of the models that only a reader has."""
    found: list[str] = []
    for word in words_of(line):
        option = found[-1] if found else ""
        if option in (*OF_TARGET, *OF_DRAFT):
            word = MODELS.sub("builtin:target" if option in OF_TARGET else "builtin:draft", word)
        found.append(word)
    return found


def test_a_readers_models_are_the_built_in_pair() -> None:
    config = '{"model": "./my-draft"}'
    line = f"specdec serve -t ./my-model -d suffix+Qwen/Qwen3-0.6B --speculative-config '{config}' --html ./a"
    _, _, target, _, draft, _, replaced, *rest = words(line)
    assert (target, draft, replaced) == ("builtin:target", "suffix+builtin:draft", '{"model": "builtin:draft"}')
    assert rest == ["--html", "./a"]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str], may_be=(0,)) -> None:
    code = main.run(arguments)
    assert code in may_be, f"specdec {' '.join(arguments)}: {capsys.readouterr().err}"


def overwriting(arguments: list[str]) -> list[str]:
    """Two examples may write the same file."""
    return ["--force"] if {"--output", "--write-recipe"} & set(arguments) else []


def can_be_dry(name: str) -> bool:
    return any("--dry-run" in option.opts for option in program().commands[name].params)


# A conversion (`train-draft --export`) reads its draft even then.
DRY = [line for line in command_lines() if can_be_dry(words_of(line)[0]) and "train-draft --export" not in line]


def test_there_are_commands() -> None:
    assert len(DRY) > 20


@pytest.mark.parametrize("line", DRY)
def test_a_command_would_run(line, folder, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = words(line)
    dry = [] if "--dry-run" in arguments else ["--dry-run"]
    run([*arguments, *dry, *overwriting(arguments)], capsys)


@pytest.mark.parametrize("line", [line for line in command_lines() if words_of(line)[0] == "recipe"])
def test_a_command_on_recipes_runs(line, folder, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.yaml").unlink()
    if "validate" in line:
        (folder / "mine.yaml").write_text(FILES["mine.yaml"])
    run(words(line), capsys)


def lines_of(page: Path) -> list[str]:
    blocks = re.findall(r"^```console\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ specdec")]


def is_run(arguments: list[str]) -> bool:
    """Whether it ends by itself, offline, on any machine, with the built-in pair."""
    name = arguments[0]
    needs_more = {"qwen3-8b", "--endpoint", "--target-endpoint", "--engine", "--dry-run", "mtp"} & set(arguments)
    return name in ("generate", "audit", "doctor", *MEASURES) and not needs_more


@pytest.mark.slow
@pytest.mark.skipif(not HAS_PAIR, reason="the built-in pair is not there")
@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page, folder, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in filter(is_run, map(words, lines_of(page))):
        few = ["--num-prompts", "8" if "--batch-sizes" in arguments else "2"] if arguments[0] in MEASURES else []
        few += ["-n", "4"] if arguments[0] in ("generate", *MEASURES) and "--trace-from" not in arguments else []
        run(
            [*arguments, *few, *overwriting(arguments)],
            capsys,
            (ExitCode.DONE, ExitCode.GATE) if "--fail-if" in arguments else (0,),
        )
