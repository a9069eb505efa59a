"""`--json-schema`, `--regex`, `--choice`: where they are taken, where they are refused, and what they do."""

import json
import re
from pathlib import Path

import pytest
from tiny_engine import ngram, tiny_lm
from tiny_grammar import byte_tokenizer

from specdec_cli.cli.main import run
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory):
    return tiny_lm(tmp_path_factory.mktemp("cli"), "llama", 1, vocab_size=TOKENIZER.num_tokens)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, target, tmp_path: Path):
    def load(recipe, *, trust_remote_code: bool = False, progress=None):
        return Engine(target, ngram(), TOKENIZER, EngineOptions(3), eos_token_ids=(0,))

    monkeypatch.setattr(Engine, "from_recipe", load)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def generate(*arguments: str) -> int:
    return int(run(["generate", "-d", "ngram:min=1", "-n", "60", "ab ab", *arguments]))


def test_every_output_follows_it(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    (loaded / "s.json").write_text(json.dumps(schema | {"additionalProperties": False}))
    assert generate("--json-schema", "s.json", "--compare") == 0
    assert json.loads(capsys.readouterr().out).keys() == {"ok"}
    assert generate("--json-schema", (loaded / "s.json").read_text(), "--quiet") == 0
    assert json.loads(capsys.readouterr().out).keys() == {"ok"}
    assert generate("--regex", "(ab){2,5}", "--json", "--temperature", "1") == 0
    document = json.loads(capsys.readouterr().out)
    assert re.fullmatch("(ab){2,5}", document["outputs"][0]["text"])
    assert document["outputs"][0]["finish_reason"] == "stop"
    assert document["recipe"]["structured"] == {"regex": "(ab){2,5}"}
    assert generate("--choice", "no", "--choice", "yes", "--quiet") == 0
    assert capsys.readouterr().out.strip() in ("no", "yes")


def test_a_recipe_may_hold_it_and_an_option_replaces_it(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    (loaded / "r.yaml").write_text("structured:\n  json_schema:\n    type: array\n    maxItems: 0\n")
    assert generate("-r", "r.yaml", "--quiet") == 0
    assert capsys.readouterr().out.strip() == "[]"
    assert generate("-r", "r.yaml", "--quiet", "--choice", "yes") == 0
    assert capsys.readouterr().out.strip() == "yes"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--regex", "a("], "`regex` does not compile: unclosed group"),
        (["--regex", "a", "--choice", "b"], "`--choice` and `--regex` exclude each other"),
        (["--json-schema", "missing.json"], "`missing.json` cannot be read"),
        (["--json-schema", '{"type":'], "`json_schema` does not compile: EOF"),
        (["--choice", ""], "`--choice`"),
    ],
)
def test_what_is_wrong_is_named(loaded, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert generate(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


@pytest.mark.parametrize("command", ["bench", "sweep-k", "audit", "compare-drafts", "serve"])
def test_a_command_of_free_text_refuses_it(loaded, capsys: pytest.CaptureFixture[str], command: str) -> None:
    (loaded / "r.yaml").write_text("structured: {regex: a+}\n")
    assert int(run([command, "-r", "r.yaml", *(["-d", "ngram"] if command != "serve" else [])])) == 2
    assert "`structured.regex` has no effect in this command" in capsys.readouterr().err


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(
    ("arguments", "is_cut"),
    [
        (("--regex", "a{40}", "-n", "16"), True),
        (("--json-schema", "s.json", "-n", "3"), True),
        (("--choice", "a choice of many letters", "-n", "4"), True),
        (("--regex", "(ab){2,}", "-n", "4"), False),  # complete, although more could follow
        (("--regex", "a{5}", "-n", "16"), False),
        (("-n", "4"), False),
    ],
)
def test_49_27_an_output_that_n_cuts_before_it_matches_is_named(
    loaded, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], is_cut: bool
) -> None:
    (loaded / "s.json").write_text(
        '{"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}'
    )
    assert generate(*arguments) == 0
    said = "note: the output is incomplete, because -n "
    assert (said in capsys.readouterr().err) == is_cut


def test_49_27_cut_outputs_are_numbered_with_json_too(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("ba ba", "--regex", "a{40}", "-n", "16", "--json") == 0
    out, err = capsys.readouterr()
    assert [one["finish_reason"] for one in json.loads(out)["outputs"]] == ["length", "length"]
    assert "note: output 1, 2: incomplete, because -n 16 cut it before it matched" in err
