"""The same file gives the same prompts to every command; conversations run turn by turn; `~` and encodings of paths."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from fake_server import Fake, serving
from schemas import assert_fits

from specdec_cli.cli.main import run
from specdec_cli.engine.driver import Driver
from specdec_cli.errors import UsageError
from specdec_cli.events import Failed
from specdec_cli.files import given_path
from specdec_cli.lm.llama.library import cache_folder
from specdec_cli.measure.baseline import read_baseline
from specdec_cli.measure.documents.generate import GenerateDocument
from specdec_cli.recipe import resolve
from specdec_cli.recipe.repository import read_repository
from specdec_cli.text.chat_template import named_template

GIVEN = [
    {"from": "human", "value": "Tell me about a dog."},
    {"from": "gpt", "value": "A dog ran."},
    {"from": "human", "value": "And then?"},
]
ROWS = [
    {"conversations": GIVEN, "category": "given"},
    {"turns": ["A cat sat.", "Why did it sit?", "What now?"], "category": "asked"},
    {"prompt": [{"role": "user", "content": "Once"}]},
]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder().parent))  # where our decoder is compiled already
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run([*arguments, "-n", "8", "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_generate_decodes_every_turn_after_the_models_own_answers(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "generate", "--prompt-file", "~/rows.jsonl.gz", "--chat", "--compare")
    assert_fits(found, GenerateDocument)
    outputs = found["outputs"]
    assert [(one["index"], one.get("turn"), one.get("category")) for one in outputs] == [
        (0, None, "given"),
        (1, 1, "asked"),
        (2, 2, "asked"),
        (3, 3, "asked"),
        (4, None, None),
    ]
    assert found["compare"]["equal"] is True
    told = [{"role": "user", "content": "A cat sat."}]
    for output, question in zip(outputs[1:4], ["Why did it sit?", "What now?", ""], strict=True):
        told += [{"role": "assistant", "content": output["text"]}, {"role": "user", "content": question}]
    Path("last.jsonl").write_text(json.dumps({"messages": told[:5]}) + "\n")
    (alone,) = document(capsys, "generate", "--prompt-file", "last.jsonl", "--chat", "--quiet")["outputs"]
    assert (alone["prompt_tokens"], alone["token_ids"]) == (outputs[3]["prompt_tokens"], outputs[3]["token_ids"])


def test_the_text_of_every_turn_has_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--prompt-file", "rows.jsonl.gz", "--chat", "-n", "4"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.split("\n") if line.startswith("###")] == [f"### {n}" for n in range(1, 6)]
    assert run(["generate", "--prompt-file", "rows.jsonl.gz", "-n", "4"]) == 0
    out, err = capsys.readouterr()
    assert out.count("###") == 3
    assert "note: 2 rows hold a conversation, of which the first user message is the prompt; --chat reads all" in err


def test_what_follows_a_turn_that_failed_is_left_out_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, given = Driver.step, Path("two.jsonl")
    given.write_text(json.dumps(ROWS[1]) + "\n" + json.dumps(ROWS[2]) + "\n")

    def fail_the_first_of_two(self):
        events = step(self)
        if len(self.open) == 2:
            first = min(self.open)
            self.abort(first)
            events.append(Failed(first, ValueError("planted")))
        return events

    monkeypatch.setattr(Driver, "step", fail_the_first_of_two)
    assert run(["generate", "--prompt-file", "two.jsonl", "--chat", "-n", "4"]) == 1
    out, err = capsys.readouterr()
    assert [line for line in out.split("\n") if line.startswith("###")] == [f"### {n}" for n in range(1, 5)]
    assert "note: 2 later turns were left out: the turn before failed" in err
    assert "error: 1 of 4 prompts failed; prompt 1: unexpected ValueError: planted" in err


def test_turns_that_fill_the_context_are_left_out_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--prompt-file", "rows.jsonl.gz", "--chat", "-n", "8", "--max-model-len", "40"]
    assert run(arguments) == 0
    out, err = capsys.readouterr()
    assert "left out: the conversation before fills the context" in err
    assert out.rstrip().split("\n")[-2] == "### 5", "what comes after a turn that is left out is shown"


def test_the_system_option_stands_for_the_rows_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.jsonl").write_text('{"system": "Long and winding words.", "prompt": "a"}\n{"prompt": "a"}\n')
    own, none = document(capsys, "generate", "--prompt-file", "s.jsonl", "--chat", "--quiet")["outputs"]
    assert own["prompt_tokens"] > none["prompt_tokens"]
    one, other = document(capsys, "generate", "--prompt-file", "s.jsonl", "--system", "Hm.", "--quiet")["outputs"]
    assert own["prompt_tokens"] != one["prompt_tokens"] == other["prompt_tokens"] > none["prompt_tokens"]


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize(
    "command",
    [
        ["bench", "--repeats", "1"],
        ["sweep-k", "--repeats", "1", "--k-max", "1"],
        ["compare-drafts", "-d", "ngram", "--repeats", "1", "--k-max", "1"],
    ],
    ids=lambda command: command[0],
)
def test_measurements_take_the_same_rows_and_every_turn(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    plain = document(capsys, *command, "--dataset", "rows.jsonl.gz")
    assert plain["workload"]["num_prompts"] == 3
    assert any("2 rows hold a conversation" in notice for notice in plain["notices"])
    chats = document(capsys, *command, "--dataset", "~/rows.jsonl.gz", "--chat")
    assert chats["workload"]["num_prompts"] == 5
    assert chats["workload"]["tasks"] == {"given": 1, "asked": 3, "unnamed": 1}
    assert not any("conversation" in notice for notice in chats["notices"])


def test_audit_takes_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt-file", "rows.jsonl.gz", "--mode", "greedy", "-k", "2", "--batch-sizes", "1"]
    found = document(capsys, "audit", *words)
    assert found["checked"]["prompts"] == 3
    assert found["notices"][0] == "2 rows hold a conversation, of which the first user message is the prompt"


def test_an_endpoint_is_sent_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake()) as fake:
        arguments = ["bench", "--endpoint", fake.url, "--dataset", "rows.jsonl.gz", "--repeats", "1"]
        assert run(arguments) == 0
        assert [one["prompt"] for one in fake.requests[1:]] == ["Tell me about a dog.", "A cat sat.", "Once"]
        num = len(fake.requests) + 1  # and a warm-up
        assert run([*arguments, "--chat"]) == 0
    sent = [[(one["role"], one["content"]) for one in request["messages"]] for request in fake.requests[num:]]
    assert sent[0] == [("user", "Tell me about a dog."), ("assistant", "A dog ran."), ("user", "And then?")]
    assert [("user", "A cat sat.")] in sent
    assert [("user", "Once")] in sent
    capsys.readouterr()


def test_a_tilde_in_every_path(capsys: pytest.CaptureFixture[str], place) -> None:
    """A shell leaves `~` in `--output=~/x`, in a recipe and in a variable."""
    (place / "r.yaml").write_text("sampling: {max_new_tokens: 2}\n")
    assert run(["generate", "-r", "~/r.yaml", "--output=~/o.json", "--quiet", "Once"]) == 0
    assert len(json.loads((place / "o.json").read_text())["outputs"][0]["token_ids"]) == 2
    words = ["bench", "--num-prompts", "2", "-n", "2", "--repeats", "1", "--quiet"]
    files = [f"--{kind}=~/b.{kind}" for kind in ("html", "markdown", "csv", "junit")]
    assert run([*words, *files, "--plot=~/b.svg", "--output=~/b.json"]) == 0
    assert {path.name for path in place.glob("b.*")} == {
        f"b.{end}" for end in ("html", "markdown", "csv", "junit", "svg", "json")
    }
    assert run(["recipe", "copy", "builtin", "~/copied.yaml"]) == 0
    assert run(["recipe", "list", "--output=~/list.json"]) == 0
    assert run(["recipe", "validate", "~/copied.yaml", "--output=~/v.json"]) == 0
    assert run(["recipe", "show", "~/copied.yaml"]) == 0
    assert {"copied.yaml", "list.json", "v.json"} <= {path.name for path in place.iterdir()}
    assert not (place / "~").exists()
    capsys.readouterr()


def test_a_home_that_does_not_exist_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["-r", "~no-such-user/r.yaml"], ["-t", "~no-such-user/x"], ["--output", "~no-such-user/x"]):
        assert run(["generate", *words, "--quiet", "Once"]) == 2
        err = capsys.readouterr().err
        assert "begins with a home folder that does not exist" in err
        assert "unexpected" not in err


MARKS = {"utf-8-sig": b"\xef\xbb\xbf", "utf-16": b"", "utf-32": b""}


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("encoding", MARKS)
def test_text_files_may_begin_with_a_byte_order_mark(place, encoding, capsys: pytest.CaptureFixture[str]) -> None:
    """What Windows' editors and PowerShell write: recipes, schemas, templates, results."""
    (place / "s.json").write_bytes('{"type": "boolean"}'.encode(encoding))
    (place / "r.yaml").write_bytes("structured: {json_schema: ~/s.json}\nsampling: {seed: 7}\n".encode(encoding))
    (place / "t.jinja").write_bytes("{{ messages[0].content }}é".encode(encoding))
    assert resolve("~/r.yaml").recipe.sampling.seed == 7
    assert named_template("~/t.jinja") == "{{ messages[0].content }}é"
    assert run(["generate", "-r", "r.yaml", "--quiet", "-n", "20", "Once"]) == 0
    assert capsys.readouterr().out.strip() in ("true", "false")
    (place / "models.yaml").write_bytes("small: builtin\n".encode(encoding))
    assert read_repository("~/models.yaml") == {"small": "builtin"}
    (place / "b.json").write_bytes('{"schema": "specdec.bench/1"}'.encode(encoding))
    with pytest.raises(UsageError, match="has no interval to compare with"):
        read_baseline("~/b.json", "specdec.bench/1")


def test_given_paths_are_what_a_person_typed(place) -> None:
    assert given_path("~/a/b") == place / "a/b"
    assert given_path("./a") == Path("a")
    assert given_path("a~b") == Path("a~b")


@pytest.mark.parametrize("flag", ["--prompt-file", "--dataset"])
@pytest.mark.parametrize("command", ["generate", "bench", "sweep-k", "compare-drafts"])
def test_49_13_every_command_with_prompts_has_the_same_options(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = ["-d", "builtin:draft", "-d", "ngram"] if command == "compare-drafts" else []
    choice = [flag, "rows.jsonl.gz", "--tasks", "given,asked", "--num-prompts", "1"]
    assert run([command, *drafts, *choice, "--dry-run", "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["num_prompts"] == 1
    assert found["recipe"]["workload"]["dataset"] == "rows.jsonl.gz"
    assert run([command, *drafts, "--prompt-file", "a.txt", "--dataset", "b.txt", "--dry-run"]) == 2
    assert "`--dataset` and `--prompt-file` set the same thing" in capsys.readouterr().err


def test_49_13_audit_and_train_draft_have_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    choice = ["--dataset", "rows.jsonl.gz", "--tasks", "unknown"]
    assert run(["audit", *choice]) == 2
    assert "no prompt has the task `unknown`" in capsys.readouterr().err
    for flag in ("--data", "--dataset"):
        assert run(["train-draft", flag, "builtin:stories", "--dry-run", "--json"]) == 0, capsys.readouterr().err
        assert json.loads(capsys.readouterr().out)["recipe"]["train"]["data"] == "builtin:stories"


def test_49_13_generate_refuses_a_choice_among_prompts_that_are_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for choice in (["--num-prompts", "3"], ["--tasks", "given"]):
        assert run(["generate", "Hi", *choice, "--dry-run"]) == 2
        assert f"`{choice[0]}` has no effect without a data set" in capsys.readouterr().err
    assert run(["generate", "Hi", "--dataset", "builtin:mini", "--dry-run"]) == 2
    assert "given as arguments and with --dataset" in capsys.readouterr().err
