"""`specdec train-draft` with its other methods, the files beside a draft, and `--export`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_engine import letter_tokenizer
from tiny_heads import publish, random_weights
from tiny_models import make_tiny

from specdec_cli.cli import main

RUN = ["--data", "builtin:mini", "--output", "new"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = make_tiny("llama", tmp_path_factory.mktemp("target"), 1, num_hidden_layers=6)
    letter_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{'abcdefghij'[i]}{'klmnopqrst'[i]}a\n" for i in range(6)))
    return path


@pytest.mark.in_turn(0, every=5)
@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark", "pard", "medusa"])
def test_a_trained_draft_runs_by_its_recipe(
    target: str, prompts: Path, tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "draft"
    words = ["train-draft", "-t", target, "--data", str(prompts), "--output", str(folder), "-n", "12", "--depth", "2"]
    words += ["--num-held-out", "2", "--batch-size", "4", "--max-steps", "1", "--method", method]
    assert main.run([*words, *(["--start-from", target] if method == "pard" else [])]) == 0
    card = (folder / "README.md").read_text()
    assert f"tags: [speculative-decoding, {method}]" in card
    assert "## Acceptance on held-out prompts" in card
    capsys.readouterr()
    recipe = str(folder / "recipe.yaml")
    assert main.run(["generate", "abc", "-r", recipe, "-n", "8", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)["outputs"][0]
    assert main.run(["generate", "abc", "-t", target, "-d", "none", "-n", "8", "--json"]) == 0
    assert output["token_ids"] == json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"]
    assert output["speculative"]["num_draft_tokens"] > 0


def test_a_head_is_written_in_another_format(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = str(publish(tmp_path / "head", random_weights(True), "specforge", (1, 2, 3)))
    words = ["train-draft", "--export", "speculators", head, "-t", target, "--output", str(tmp_path / "new")]
    assert main.run([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out == f"# would write {head} in the format speculators\n"
    assert main.run([*words, "--json"]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["format"] == "speculators"
    assert "EAGLE-3 head, speculators 0.9.0 format: reads the outputs of layers 1, 2, 3" in found.err
    assert main.run(words) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--export", "speculators"], "there is no draft to convert"),
        (["--export", "speculators", "head"], "there is no folder to write the draft into"),
        (["head"], "`head` is a draft to convert, and no format is named"),
        (["--export", "gguf", "head", "--output", "new"], "there is no format `gguf`"),
        (["--export", "gguf", "head", "--dry-run"], "there is no format `gguf`"),
        (["--export", "speculators", "head", "--data", "builtin:mini"], "`--data` has no effect with --export"),
        (["--export", "speculators", "head", "--method", "eagle3"], "`--method` has no effect with --export"),
        (["--export", "speculators", "head", "--resume"], "`--resume` has no effect with --export"),
        (["--export", "speculators", "head", "--plot", "a.svg"], "`--plot` has no effect with --export"),
        (["--export", "speculators", "head", "--html", "a.html"], "`--html` has no effect with --export"),
        (
            ["--method", "medusa", "--layers", "1-2", "--data", "builtin:mini", "--output", "new"],
            "`train.layers` has no",
        ),
        (["--method", "pard", "--data", "builtin:mini", "--output", "new"], "there is none to begin with"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["train-draft", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_misses_the_draft_that_a_conversion_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["train-draft", "--export", "speculators", "./head", "--dry-run"]) != 0
    found = capsys.readouterr()
    assert "./head" in found.err
    assert found.out == ""
