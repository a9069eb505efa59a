"""Dry runs accept and refuse what the runs do, and say the same about the rows of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf_parts import SHORT, TEXT, Parts, text

from specdec_cli.cli.main import run
from specdec_cli.recipe.keys import section_class

COMMANDS = {
    "generate": ["generate"],
    "bench": ["bench"],
    "sweep-k": ["sweep-k"],
    "compare-drafts": ["compare-drafts", "-d", "builtin:draft", "-d", "ngram"],
    "audit": ["audit"],
    "train-draft": ["train-draft", "--num-held-out", "1"],
}
"""Commands with prompts, as a user begins them."""
MEASURING = ["bench", "sweep-k", "compare-drafts"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "one"}, {"prompt": ""}, {"messages": []}, {"prompt": "two"}, {"prompt": "three"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", ["a" * 260, "prompts", "rows.josnl", "mt-bench", "builtin:mini", "nobody/rows"])
@pytest.mark.parametrize("command", COMMANDS)
def test_49_12_a_prompt_file_that_is_not_there_is_named(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*COMMANDS[command], "--prompt-file", name]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: prompt file `")
    assert name in err
    assert "cannot be read: " in err


@pytest.mark.parametrize("command", COMMANDS)
def test_49_12_a_file_with_the_name_of_a_data_set_is_a_file(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mt-bench").write_text("one\ntwo\nthree\n")
    assert run([*COMMANDS[command], "--prompt-file", "mt-bench", "--dry-run", "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    section, key = ("train", "data") if command == "train-draft" else ("workload", "dataset")
    assert found["recipe"][section][key] == "./mt-bench"


@pytest.mark.parametrize("command", COMMANDS)
def test_49_12_a_dry_run_says_how_many_rows_are_left_out(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*COMMANDS[command], "--prompt-file", "rows.jsonl", "--dry-run"]) == 0
    assert "note: 2 rows without a prompt" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "run"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch-size", "9"], "a batch of `9` needs as many prompts, and there are `3`"),
        (["--fail-if", "by_task.story.acceptance_rate < 0.5"], "by_task"),
        (["--baseline", "none.json"], "none.json"),
    ],
)
@pytest.mark.parametrize("command", MEASURING)
def test_49_12_dry_runs_of_measurements_refuse_what_the_runs_do(
    command: str, words: list[str], said: str, dry: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--batch-sizes" if command == "sweep-k" and words[0] == "--batch-size" else words[0]
    assert run([*COMMANDS[command], "--dataset", "rows.jsonl", flag, *words[1:], *dry]) == 2
    assert said in capsys.readouterr().err


FILES = [
    (["--chat-template", "none.jinja"], "chat template `none.jinja` cannot be read: No such file or directory"),
    (["--chat-template", "{% if"], "the chat template of `--chat-template` is broken: "),
    (["--set", "target.generation_config=./none"], "is not a folder with a `generation_config.json`"),
]
EVERY = {**COMMANDS, "serve": ["serve"]}
EVERY["generate"] = ["generate", "Hi"]
EVERY["train-draft"] = ["train-draft", "--data", "builtin:stories"]


@pytest.mark.parametrize(("words", "said"), FILES)
@pytest.mark.parametrize("command", EVERY)
def test_49_12_a_dry_run_looks_for_the_files_of_the_run(
    command: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [] if command == "serve" or "--chat-template" not in words else ["--chat"]
    assert run([*EVERY[command], *words, *chat, "--dry-run"]) == 2
    assert said in capsys.readouterr().err


def test_49_12_a_dry_run_looks_for_the_schema_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "Hi", "--json-schema", "none.json", "--dry-run"]) == 2
    assert "the JSON Schema `none.json` cannot be read" in capsys.readouterr().err


VALUES: dict[str, object] = {
    "target.model": "builtin:draft",
    "target.generation_config": "none",
    "target.chat_template": "{{ messages }}",
    "target.default_chat_template_kwargs": {},
    "speculation.tree": "2,2",
    "speculation.k_by_batch": "1:5,8:3",
    "speculation.k_by_context": "4000:2,8000:0",
    "sampling.stop": ["."],
    "sampling.stop_token_ids": [3],
    "target.revision": None,
    "draft.model": "builtin:draft",
}
"""Values for keys whose default says nothing; every other key is given its default."""
REFUSED = {
    ("audit", "target.model"): "there is no draft",
    ("bench", "target.model"): "there is no draft",
    ("sweep-k", "target.model"): "there is no draft",
    ("sweep-k", "speculation.k_by_batch"): "every k is measured",
    ("compare-drafts", "speculation.k_by_batch"): "every k is measured",
    ("sweep-k", "speculation.k_by_context"): "every k is measured",
    ("compare-drafts", "speculation.k_by_context"): "every k is measured",
    ("compare-drafts", "draft.model"): "cannot go with",
}
"""Keys that contradict what a command does, with a sentence that says so."""


def keys() -> list[tuple[str, object]]:
    """Each key of the sections that say what is decoded and how, with a value that changes nothing else."""
    found = []
    for section in ("target", "draft", "speculation", "sampling", "engine"):
        owner = section_class(section)
        assert owner is not None
        for key, field in owner.model_fields.items():
            path = f"{section}.{key}"
            found.append((path, VALUES.get(path, field.get_default(call_default_factory=True))))
    left_out = ("draft.method", "speculation.p_min")
    return [(path, value) for path, value in found if path not in left_out]


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize("command", [*EVERY, "export"])
def test_49_12_every_command_takes_every_key(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A method and a draft model exclude each other, and p_min needs a policy of its own: they are tested elsewhere."""
    words = ["export", "vllm"] if command == "export" else [*EVERY[command], "--dry-run", "--json"]
    accepted: dict[str, list[str]] = {}
    for path, value in keys():
        given = ["--set", f"{path}={json.dumps(value)}"]
        message = REFUSED.get((command, path))
        if message is None:
            accepted.setdefault(path.partition(".")[0], []).extend(given)
        else:
            assert run([*words, *given]) == 2, path
            assert message in capsys.readouterr().err
    for given in accepted.values():  # a section at a time: a dry run takes a second
        assert run([*words, *given]) == 0, capsys.readouterr().err


WITHOUT_DRAFT = ("compare-drafts", "train-draft")
ROLES = [(command, "target") for command in EVERY] + [(one, "draft") for one in EVERY if one not in WITHOUT_DRAFT]


@pytest.mark.parametrize(("command", "role"), ROLES)
def test_49_a_dry_run_looks_for_the_parts_of_a_gguf_file(
    command: str, role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Parts({"general.architecture": (TEXT, text("llama"))}, [], b"")
    first.set("split.count", 2, SHORT)
    first.set("split.no", 0, SHORT)
    first.write(tmp_path / "m-00001-of-00002.gguf")
    others = ["-d", "ngram"] if role == "target" and command in ("bench", "sweep-k", "audit") else []
    words = [*EVERY[command], *others, "--set", f"{role}.model=./m-00001-of-00002.gguf", "--dry-run"]
    assert run(words) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: part 2 of 2 of `./m-00001-of-00002.gguf` is missing: `")


@pytest.mark.parametrize("command", EVERY)
def test_49_a_dry_run_looks_for_the_configuration_of_a_target(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    others = ["-d", "ngram"] if command in ("bench", "sweep-k", "audit") else []
    assert run([*EVERY[command], *others, "-t", "./model", "--dry-run"]) == 1
    assert capsys.readouterr().err.startswith("error: model folder `./model` has no `config.json`")
