"""`--tree` and `speculation.tree` in every command: texts, figures and tables of trees, and what does not fit them."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from schemas import assert_fits
from tiny_engine import letter_tokenizer
from tiny_models import make_tiny

from specdec_cli.cli.main import run
from specdec_cli.document import ResultDocument
from specdec_cli.measure.documents.bench import BenchDocument
from specdec_cli.measure.documents.compare_drafts import CompareDocument
from specdec_cli.measure.documents.generate import GenerateDocument
from specdec_cli.recipe import resolve

SHORT = ["-n", "12", "--ignore-eos"]
TREES = ["3,2,1", "3,2+1", "dynamic:12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft with other weights, and a file of prompts."""
    made = tmp_path_factory.mktemp("models")
    for name, seed in (("target", 0), ("draft", 1)):
        make_tiny("llama", made / name, seed)
        tokenizer = letter_tokenizer()
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        tokenizer.save_pretrained(made / name)
    rows = [{"prompt": text, "category": kind} for text, kind in (("ababab", "x"), ("the cat", "y"))]
    (made / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return made


@pytest.fixture
def command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command on the tiny pair."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    for name in ("CI", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def start(name: str, *arguments: str, draft: str = str(folder / "draft")) -> int:
        pair = ["-t", str(folder / "target"), "-d", draft]
        return int(run([name, *pair, *arguments]))

    return start


def document(capsys: pytest.CaptureFixture[str], kind: type[ResultDocument]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert_fits(found, kind)
    return found


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("draft", ["model", "ngram:min=1"])
def test_generate_gives_plain_decodings_text(
    command: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str], draft: str
) -> None:
    given = ["ababab", *SHORT, "--json", "--quiet"]
    assert command("generate", *given, "-k", "0") == 0
    plain = document(capsys, GenerateDocument)
    name = str(folder / "draft") if draft == "model" else draft
    for tree in TREES:
        assert command("generate", *given, "--tree", tree, draft=name) == 0
        found = document(capsys, GenerateDocument)
        assert [one["text"] for one in found["outputs"]] == [one["text"] for one in plain["outputs"]]
        assert found["recipe"]["speculation"]["tree"] == tree
        counts = found["totals"]["speculative"]
        if draft == "model":  # n-grams may have seen one continuation alone
            assert counts["num_draft_nodes"] > counts["num_draft_tokens"] > 0
            assert len(counts["acceptance_by_rank"]) >= 2


def test_generate_shows_nodes_ranks_and_the_first_tree(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("generate", "ababab", *SHORT, "--tree", "3,2,1", "--show-drafts") == 0
    err = capsys.readouterr().err
    assert "{accepted, not the draft's first choice}" in err
    assert "first drafted tree: 15 nodes, " in err
    assert err.count("├── ") + err.count("└── ") == 9  # what has no sibling stands in its parent's line
    for row in ("drafted nodes", "accepted by rank 1, 2, …"):
        assert re.search(rf"^ {row} +\S", err, re.MULTILINE)
    assert max(map(len, err.splitlines()[-16:])) <= 80


def test_chains_look_as_they_did(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("generate", "ababab", *SHORT, "-k", "3", "--show-drafts") == 0
    captured = capsys.readouterr()
    assert not re.search("node|rank|tree|choice", captured.err)
    assert "{" not in captured.out


def test_bench_counts_trees_in_its_document_table_and_files(
    command: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = [*SHORT, "--dataset", str(folder / "rows.jsonl"), "--repeats", "1"]
    files = ["--markdown", str(tmp_path / "b.md"), "--json"]
    assert command("bench", *given, "--tree", "3,2,1", "--details", *files) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert_fits(found, BenchDocument)
    counts = found["draft"]["speculative"]
    assert counts["num_draft_nodes"] > counts["num_draft_tokens"]
    assert len(counts["acceptance_by_rank"]) == 3
    assert "num_draft_nodes" not in found["plain"]["speculative"]
    assert found["lossless"]["mismatches"] == 0
    for text in (captured.err, (tmp_path / "b.md").read_text()):
        assert "accepted by rank" in text
        assert str(counts["num_draft_nodes"]) in text


def test_compare_drafts_counts_trees_of_each_draft(
    command: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*SHORT, "--dataset", str(folder / "rows.jsonl"), "--repeats", "1"]
    assert command("compare-drafts", *given, "-d", "ngram:min=1", "--tree", "3,2,1", "--details", "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert_fits(found, CompareDocument)
    model = next(row for row in found["rows"] if row["method"] == "model")
    counts = model["speculative"]
    assert counts["num_draft_nodes"] > counts["num_draft_tokens"]
    assert found["lossless"]["mismatches"] == 0
    assert f" {counts['num_draft_nodes']} " in captured.err
    assert "accepted by rank" in captured.err


def test_chat_says_how_large_the_trees_were(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abab\n")))
    assert command("chat", *SHORT, "--tree", "3,2,1") == 0
    assert re.search(r"[\d.]+\s+nodes per step", capsys.readouterr().err)


def test_a_recipe_names_a_tree(folder: Path, tmp_path: Path) -> None:
    def tree(*lines: str) -> tuple[str | None, int]:
        file = tmp_path / "r.yaml"
        file.write_text("\n".join([f"target: {{model: {folder}/target}}", f"draft: {{model: {folder}/draft}}", *lines]))
        speculation = resolve(str(file)).recipe.speculation
        return speculation.tree, speculation.num_speculative_tokens

    assert tree("speculation:", "  tree: 3,2,1") == ("3,2,1", 3)
    assert tree("speculation:", "  tree: 3") == ("3", 1)
    assert tree("speculation:", "  tree: ' 3, 2 '") == ("3,2", 2)
    assert tree("speculation:", "  tree: dynamic:9")[0] == "dynamic:9"
    assert tree("speculation:", "  tree: 3,2", "  num_speculative_tokens: 5") == ("3,2", 5)
    assert tree("speculation:", "  tree: null")[0] is None


AUTO_WORDS = (
    "the tree `auto` is for `sweep-k`, which looks for the best shape; give the shape that it finds, such as `4,2,1`"
)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--tree", "4,x"], "`--tree` is not usable: the tree `4,x` is not a shape; write children per depth"),
        (["--tree", ""], "the tree `` is not a shape"),
        (["--tree", "none"], "the tree `none` is not a shape"),
        (["--tree", "auto"], f"`--tree` is not usable: {AUTO_WORDS}"),
        (["--set", "speculation.tree=auto"], AUTO_WORDS),
        (["--tree", "0,2"], "the tree `0,2`"),
        (["--tree", "dynamic:65"], "`65` nodes, and `64` are possible"),
        (["--tree", "8,8"], "`72` nodes, and `64` are possible"),
        (["--tree", "3,2,1", "-k", "2"], "is `3` deep, and `--num-speculative-tokens` is `2`"),
        (["--tree", "3,2,1", "-k", "0"], "needs drafted tokens, and `--num-speculative-tokens` is `0`"),
        (["--tree", "dynamic:8", "-k", "0"], "needs drafted tokens, and `--num-speculative-tokens` is `0`"),
        (["--tree", "3,2", "--depth-policy", "adaptive"], "does not fit depth_policy `adaptive`"),
        (["--tree", "3,2", "--verify", "block"], "`block` judges chains alone"),
        (["--tree", "3,2", "--verify", "typical", "--temperature", "1"], "`typical` judges chains alone"),
    ],
)
@pytest.mark.parametrize("name", ["generate", "bench"])
def test_what_does_not_fit_a_tree_is_refused(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], name: str, given: list[str], words: str
) -> None:
    assert command(name, *(["ab"] if name == "generate" else []), *SHORT, *given) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("error: ") == 1
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("name", ["chat", "serve", "audit", "compare-drafts"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--tree", "4,x"], "the tree `4,x` is not a shape"),
        (["--tree", "auto"], f"`--tree` is not usable: {AUTO_WORDS}"),
        (["--tree", "dynamic:65"], "`64` are possible"),
        (["--tree", "3,2", "--verify", "block"], "`block` judges chains alone"),
    ],
)
def test_every_command_refuses_what_is_no_tree(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], name: str, given: list[str], words: str
) -> None:
    if name == "serve":
        given = [*given, "--port", "0"]
    assert command(name, *given) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "draft"), [("generate", "none"), ("generate", "prediction:text=ab"), ("serve", "none"), ("chat", "none")]
)
def test_a_draft_without_trees_is_refused(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], name: str, draft: str
) -> None:
    given = ["ab"] if name == "generate" else ["--port", "0"] if name == "serve" else []
    assert command(name, *given, "--tree", "3,2", draft=draft) == 2
    assert f"the draft `{draft.partition(':')[0]}` builds no trees" in capsys.readouterr().err


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize(
    ("verify", "temperature"), [("auto", "0"), ("auto", "0.8"), ("gumbel", "0.8"), ("rejection", "1")]
)
def test_rules_that_judge_trees_take_them(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], verify: str, temperature: str
) -> None:
    sampled = ["--verify", verify, "--temperature", temperature, "--top-p", "0.9", "--json", "--quiet"]
    assert command("generate", "abab", *SHORT, "--tree", "3,2,1", *sampled) == 0
    assert document(capsys, GenerateDocument)["totals"]["speculative"]["num_draft_nodes"] > 0


def test_a_chain_by_another_name_takes_a_rule_for_chains(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = ["--verify", "block", "--temperature", "1", "--json", "--quiet"]
    assert command("generate", "abab", *SHORT, "--tree", "1,1,1", *sampled) == 0
    tree = document(capsys, GenerateDocument)
    assert command("generate", "abab", *SHORT, "-k", "3", *sampled) == 0
    chain = document(capsys, GenerateDocument)
    assert [one["text"] for one in tree["outputs"]] == [one["text"] for one in chain["outputs"]]
    assert "num_draft_nodes" not in tree["totals"]["speculative"]


def test_serves_plan_names_the_tree(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("serve", "--tree", "3,2,1", "--dry-run", "--json") == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert "3,2,1" in json.dumps(model)


def test_a_server_elsewhere_has_its_own_trees(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--endpoint", "http://127.0.0.1:1", "--tree", "2,1"]) == 2
    assert "`--tree` has no effect with --endpoint" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bench", "serve", "compare-drafts"])
def test_a_plan_refuses_what_the_run_refuses(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert command(name, "--dry-run", "--tree", "3,2", "--verify", "block") == 2
    assert "`block` judges chains alone" in capsys.readouterr().err
    assert command(name, "--dry-run", "--tree", "1,1", "--verify", "block") == 0, "a chain written as a tree"
