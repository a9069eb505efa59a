"""`specdec train-draft`: from prompts to a folder that --draft runs, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_engine import letter_tokenizer
from tiny_training import tiny_target

from specdec_cli.cli import main
from specdec_cli.engine.prompts import ChatMessage, PromptRow
from specdec_cli.errors import UsageError
from specdec_cli.measure.workload.chats import given_chat


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{'abcdefghij'[i]}{'klmnopqrst'[i]}a\n" for i in range(10)))
    return path


def train(target: str, data: Path | str, output: Path, *more: str) -> int:
    words = ["train-draft", "-t", target, "--data", str(data), "--output", str(output), "-n", "16", "--depth", "2"]
    return main.run([*words, "--num-held-out", "2", "--batch-size", "4", *more])


def test_a_trained_head_runs_as_a_draft(
    target: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "head"
    page, curve = tmp_path / "run.html", tmp_path / "run.svg"
    more = ["--max-steps", "3", "--evaluate-every", "2", "--cache-features", "--html", str(page), "--plot", str(curve)]
    assert train(target, prompts, folder, *more, "--precision", "bfloat16", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_steps"] == 3
    assert [one["step"] for one in document["evaluations"]] == [2, 3]
    assert document["settled"] == {
        "layers": [0, 2, 3],
        "depth": 2,
        "draft_vocab_size": 97,
        "learning_rate": 3e-3,
        "loss": "kl",
        "precision": "bfloat16",
    }
    assert "Acceptance on held-out prompts" in page.read_text()
    assert "<svg" in curve.read_text()
    log = [json.loads(line) for line in (folder / "training" / "log.jsonl").read_text().splitlines()]
    assert [row["event"] for row in log] == [
        "step",
        "step",
        "evaluation",
        "checkpoint",
        "step",
        "evaluation",
        "checkpoint",
    ]
    assert main.run(["generate", "abc", "-t", target, "-d", str(folder), "-n", "8", "-k", "2", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)["outputs"][0]
    assert main.run(["generate", "abc", "-t", target, "-d", "none", "-n", "8", "--json"]) == 0
    assert output["token_ids"] == json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"]
    assert output["speculative"]["num_draft_tokens"] > 0


def test_49_answers_too_short_to_draft_in_are_no_acceptance(
    target: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "run.html"
    assert train(target, prompts, tmp_path / "head", "-n", "2", "--max-steps", "1", "--html", str(page)) == 0
    err = capsys.readouterr().err
    assert "step 1: acceptance was not measured: the answers to the held-out prompts are too short" in err
    assert "best:" not in err
    assert "try it: specdec bench -r" in err
    assert "acceptance was not measured" in page.read_text()


def test_a_run_goes_on_with_more_steps_only_if_nothing_else_changed(
    target: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "head"
    assert train(target, prompts, folder, "--max-steps", "1") == 0
    assert train(target, prompts, folder, "--max-steps", "1") == 2
    assert "already exists" in capsys.readouterr().err
    assert train(target, prompts, folder, "--max-steps", "1", "--resume", "--learning-rate", "0.1") == 2
    assert "began with another `learning_rate`" in capsys.readouterr().err
    prompts.write_text(prompts.read_text().replace("a", "b"))
    assert train(target, prompts, folder, "--max-steps", "1", "--resume") == 2
    assert "its prompts have changed" in capsys.readouterr().err
    assert train(target, prompts, folder, "--max-steps", "1", "--force") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", "x"], "there is no data to train on"),
        (["--data", "builtin:stories"], "there is no folder to write the draft into"),
        (["--data", "builtin:stories", "--answers-per-prompt", "2", "--output", "x"], "the same at temperature 0"),
        (["--data", "builtin:stories", "--output", "x", "--resume"], "there is no training run in `x` to continue"),
        (["--output", "x", "--resume"], "there is no training run in `x` to continue"),
        (["--data", "builtin:stories", "--output", "x", "--num-held-out", "36"], "leaves none to train on"),
        (["--data", "builtin:stories", "--output", "x", "--method", "eagle9"], "unknown training method `eagle9`"),
        (["--data", "missing.jsonl", "--output", "x"], "missing.jsonl"),
        (["--data", "builtin:stories", "--num-held-out", "36", "--dry-run"], "leaves none to train on"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["train-draft", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x" / "config.json").exists()


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layers", "0-99-3"], "hidden states of layer `99`"),
        (["--method", "dflash", "--mask-token", "100000"], "the mask token is `100000`"),
        (["--method", "medusa", "--draft-vocab-size", "8"], "`train.draft_vocab_size` has no meaning"),
        (["--method", "distill", "--num-layers", "9"], "the target has 4 layers"),
        (["--method", "pard"], "there is none to begin with"),
        (["-n", "1"], "an answer of 1 token is too short to learn from"),
        (["--keep-answers"], "row 1 has no answer to keep"),
        (["--num-held-out", "10"], "leaves none to train on"),
    ],
)
def test_a_refused_run_leaves_the_earlier_one_as_it_is(
    target: str, prompts: Path, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "head"
    (folder / "training").mkdir(parents=True)
    (folder / "training" / "plan.json").write_text("{}")
    (folder / "training" / "answers.jsonl").write_text("hours of work")
    assert train(target, prompts, folder, "--force", *words) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert (folder / "training" / "answers.jsonl").read_text() == "hours of work"
    assert train(target, prompts, tmp_path / "new", *words) == 2
    assert not (tmp_path / "new").exists()


def test_given_answers_that_are_too_short_are_refused_first(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{letter}kl", "answer": "x"}) + "\n" for letter in "abcd"))
    assert train(target, data, tmp_path / "head", "--keep-answers") == 2
    assert "every answer has fewer than 2 tokens" in capsys.readouterr().err
    assert not (tmp_path / "head").exists()


def test_answers_in_the_data_are_kept(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{'abcdefghij'[i]}kl", "answer": "xyz"[: 1 + i % 3] + "uvw"} for i in range(8)]
    data, folder = tmp_path / "rows.jsonl", tmp_path / "head"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train(target, data, folder, "--max-steps", "1", "--keep-answers") == 0
    num_tokens = sum(len(rows[i]["answer"]) for i in (0, 1, 3, 4, 5, 7))
    assert f"training eagle3: 6 samples of {num_tokens} tokens" in capsys.readouterr().err
    assert not (folder / "training" / "answers.jsonl").exists()
    data.write_text("".join(json.dumps({**row, "answer": "" if i == 4 else "x"}) + "\n" for i, row in enumerate(rows)))
    assert train(target, data, tmp_path / "other", "--keep-answers") == 2
    assert "row 5 has no answer to keep" in capsys.readouterr().err


def row_of(*texts: str, **values: str) -> PromptRow:
    """A conversation that begins with the user."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    num = len(texts) - 1 + len(texts) % 2
    kept = tuple(ChatMessage(one["role"], one["content"]) for one in messages[:num])
    return PromptRow(0, texts[0], messages=kept, values={"conversations": messages, **values})


def test_a_conversation_ends_with_its_last_answer() -> None:
    def texts(row: PromptRow) -> list[str]:
        return [one["content"] for one in given_chat(row)]

    assert texts(row_of("a", "b")) == ["a", "b"]
    assert texts(row_of("a", "b", "c", "d")) == ["a", "b", "c", "d"]
    assert texts(row_of("a", "b", "c")) == ["a", "b"], "nothing answers the last message"
    assert texts(row_of("a", "b", "c", answer="d")) == ["a", "b", "c", "d"]
    assert texts(row_of("a", "b", answer="d")) == ["a", "b"]
    assert texts(PromptRow(0, "a", values={"answer": "b"})) == ["a", "b"]
    row = row_of("a", "b")
    assert texts(replace(row, messages=(ChatMessage("system", "s"), *row.messages))) == ["s", "a", "b"]
    written = json.dumps(row.values["conversations"])
    assert texts(replace(row, values={"conversations": written})) == ["a", "b"]
    for empty in (row_of("a"), row_of("a", ""), PromptRow(0, "a", values={"answer": ""})):
        with pytest.raises(UsageError, match="row 1 has no answer"):
            given_chat(empty)


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "head"
    assert main.run(["train-draft", "--data", "builtin:stories", "--output", str(folder), "--dry-run"]) == 0
    assert (
        "would train eagle3: 20 answers with at most 2560 tokens, 9 steps, 16 prompts held out"
        in capsys.readouterr().out
    )
    assert not folder.exists()


def test_every_answer_of_a_conversation_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny_target(tmp_path / "target")
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] + ' ' + m.content + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
    )
    tokenizer.save_pretrained(target)
    says = ("user", "assistant") * 3
    lengths = [(i % 3 + 1, 4, 2, i + 1, 3, 5)[: 6 - i % 3] for i in range(6)]  # every third ends with the user
    rows = [[{"role": role, "content": "x" * num} for role, num in zip(says, its, strict=False)] for its in lengths]
    data, folder = tmp_path / "chats.jsonl", tmp_path / "head"
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    assert train(target, data, folder, "--max-steps", "1", "--keep-answers", "--chat") == 0
    num_tokens = sum(num + 1 for i in (0, 2, 3, 5) for num in lengths[i][1::2])  # each with its end token
    assert f"training eagle3: 4 samples of {num_tokens} tokens" in capsys.readouterr().err


def test_49_12_a_dry_run_takes_the_chat_template_of_the_run(
    target: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    words = ["train-draft", "-t", target, "--data", str(prompts), "--num-held-out", "2", "--dry-run", "--chat"]
    for choice in (["--chat-template", str(template)], ["--set", f"target.chat_template={template}"]):
        assert main.run([*words, *choice]) == 0, capsys.readouterr().err
    assert main.run(words) == 2  # the target has no template of its own
    assert main.run([*words[:-1], "--chat-template", str(template)]) == 2
    assert "`--chat-template` has no effect without a conversation" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "bench", "sweep-k", "compare-drafts"])
def test_49_12_every_command_with_prompts_takes_a_chat_template(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, *(["Hi"] if command == "generate" else []), "--dry-run", "--chat-template", "{{ messages }}"]
    assert main.run([*words, "--chat"]) == 0, capsys.readouterr().err
    assert main.run(words) == 2
    assert "`--chat-template` has no effect without a conversation" in capsys.readouterr().err


def test_49_a_lone_message_of_the_assistant_is_no_answer() -> None:
    lone = [{"from": "gpt", "value": "hello"}]
    with pytest.raises(UsageError, match="row 1 has no answer to keep"):
        given_chat(PromptRow(0, "", values={"conversations": lone}))
