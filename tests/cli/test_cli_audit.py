"""`audit` as a person meets it: on a pair of real (tiny) checkpoints, with faults planted, and with options refused."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from planted import forget_residuals
from schemas import assert_fits
from tiny_engine import letter_tokenizer
from tiny_models import make_tiny

from specdec_cli.cli.main import run
from specdec_cli.engine import stepper
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.verify import Verdict
from specdec_cli.measure.documents.audit import AuditDocument
from specdec_cli.report.audit import verdict_words

QUICK = ["-n", "6", "--num-prompts", "2", "--k-values", "1,3", "--batch-sizes", "1,2", "--time-limit", "1"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("target", 0), ("draft", 1)):
        make_tiny("llama", folder / name, seed)
        letter_tokenizer().save_pretrained(folder / name)
    return folder


def audit(models, *arguments):
    return run(["audit", "-t", str(models / "target"), "-d", str(models / "draft"), *QUICK, *arguments])


def test_a_clean_pair_passes(models, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.measure.audit.draws.MIN_DRAWS", 40)
    assert audit(models, "--json", "--time-limit", "10") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert_fits(document, AuditDocument)
    assert document["schema"] == "specdec.audit/1"
    assert document["mode"] == "greedy,sampled,gumbel"
    assert document["verdict"] == "pass"
    assert document["mismatches"] == []
    assert document["checked"]["prompts"] == 2
    assert document["checked"]["num_draft_tokens"] > 0
    modes = {one["configuration"].split(",")[1].strip() for one in document["distribution"]}
    assert modes == {"rejection", "block", "exact-match", "gumbel"}
    assert all(
        {"vocab", "draws", "statistic", "p_value", "detectable_shift"} <= one.keys() for one in document["distribution"]
    )
    assert document["environment"]["dtype"] == "float32"
    assert verdict_words(document) in err


def test_the_targets_own_weights_accept_everything(models, capsys: pytest.CaptureFixture[str]) -> None:
    same = str(models / "target")
    assert audit(models, "--mode", "greedy", "-d", same, "--json", "--quiet") == 0
    out, err = capsys.readouterr()
    checked = json.loads(out)["checked"]
    assert checked["num_accepted_tokens"] == checked["num_draft_tokens"] > 0
    assert err == ""


def test_a_planted_bug_exits_with_3_after_the_document_is_written(
    models, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = stepper.verify

    def wrong(p, rows, starts=()):
        return [
            Verdict(tuple(range(min(len(v.path) + 1, len(row.guesses.drafted)))), v.own)
            for v, row in zip(right(p, rows, starts), rows, strict=True)
        ]

    monkeypatch.setattr(stepper, "verify", wrong)
    path = tmp_path / "audit.json"
    assert audit(models, "--mode", "greedy", "--output", str(path)) == 3
    document = json.loads(path.read_text())
    assert_fits(document, AuditDocument)
    assert document["verdict"] == "fail"
    assert {one["class"] for one in document["mismatches"]} == {"bug"}
    assert document["lossless"]["mismatches"] == len(document["mismatches"])
    assert document["lossless"]["first_divergence"] is not None
    out, err = capsys.readouterr()
    assert "FAIL" in out
    assert "error: the audit found a difference" in err


def test_a_wrong_distribution_exits_with_3(
    models, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_residuals(monkeypatch)
    monkeypatch.setattr("specdec_cli.measure.audit.draws.MIN_DRAWS", 2000)
    arguments = ["--mode", "sampled", "--verify", "rejection", "--time-limit", "0.1", "--json", "--quiet"]
    assert audit(models, *arguments) == 3
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["mismatches"] == []
    assert min(one["p_value"] for one in document["distribution"]) < 1e-6
    assert "is not the target's" in err


def test_verify_narrows_what_is_checked(models, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(models, "--verify", "exact-match", "--json", "--quiet") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["mode"] == "greedy,sampled"
    assert {one["configuration"].split(", ")[1] for one in document["distribution"]} == {"exact-match"}


def test_a_partial_audit_says_so_in_its_verdict(models, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {kind: tmp_path / f"audit.{kind}" for kind in ("markdown", "junit")}
    flags = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert audit(models, "--time-limit", "0", *flags) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"PASS, partial: 4 of \d+ runs: no difference found", out)
    assert "run: one configuration (draft, k, batch size) over a few prompts." in out, "the tables have a legend"
    text = files["markdown"].read_text()
    assert text.startswith("## specdec audit: ")
    assert re.search(r"\*\*PASS, partial: 4 of \d+ runs", text)
    assert "| mode | prompts | runs |" in text
    assert "| greedy | 2 | 1 of " in text
    assert "p-value: probability of a chi-square" in text
    suite = ElementTree.parse(files["junit"]).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("5", "0", "1")
    assert {case.get("name") for case in suite} >= {"greedy: tokens equal plain decoding", "all planned runs"}
    assert audit(models, *flags) == 2, "files that exist are not overwritten"


@pytest.mark.parametrize(
    ("verdict", "runs", "words"),
    [
        ("pass", 111, "PASS: no difference found (74 s)"),
        ("pass", 12, "PASS, partial: 12 of 111 runs: no difference found (74 s)"),
        ("fail", 111, "FAIL: the output is not what the target alone produces (74 s)"),
        ("fail", 12, "FAIL: the output is not what the target alone produces (74 s; partial: 12 of 111 runs)"),
    ],
)
def test_the_verdict_says_how_much_ran(verdict: str, runs: int, words: str) -> None:
    body = {"verdict": verdict, "seconds": 74.2, "checked": {"runs": runs, "planned_runs": 111}}
    assert verdict_words(body) == words


def test_a_difference_fails_its_junit_case(models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = stepper.verify

    def wrong(p, rows, starts=()):
        return [
            Verdict(tuple(range(min(len(v.path) + 1, len(row.guesses.drafted)))), v.own)
            for v, row in zip(right(p, rows, starts), rows, strict=True)
        ]

    monkeypatch.setattr(stepper, "verify", wrong)
    path, page = tmp_path / "audit.xml", tmp_path / "audit.md"
    assert audit(models, "--mode", "greedy", "--junit", str(path), "--markdown", str(page), "--quiet") == 3
    suite = ElementTree.parse(path).getroot()
    [failed] = [case for case in suite if case.find("failure") is not None]
    assert failed.get("name") == "greedy: tokens equal plain decoding"
    assert "**FAIL: the output is not what the target alone produces" in page.read_text()
    assert "### First difference of each output" in page.read_text()


@pytest.mark.parametrize("flag", ["--markdown", "--junit"])
def test_files_that_cannot_be_written_are_refused_before_loading(
    flag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert run(["audit", "-t", str(tmp_path), "-d", "ngram", flag, str(tmp_path / "no" / "file")]) == 2
    assert flag in capsys.readouterr().err
    same = str(tmp_path / "same")
    assert run(["audit", "-t", str(tmp_path), "-d", "ngram", flag, same, "--output", same]) == 2
    assert "two files have the same name" in capsys.readouterr().err


def test_sixteen_bits_pass_too(models, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(models, "--dtype", "bfloat16", "--mode", "greedy", "--json", "--quiet") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["environment"]["dtype"] == "bfloat16"


def test_a_prompt_files_rows_are_used(models, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "the end", "max_new_tokens": 2}\n{"prompt": "and then"}\n{"prompt": "more"}\n')
    assert audit(models, "--mode", "greedy", "--prompt-file", str(path), "--time-limit", "60", "--json", "--quiet") == 0
    checked = json.loads(capsys.readouterr().out)["checked"]
    assert (checked["prompts"], checked["tokens"]) == (2, 4 * (2 + 6))


def test_prompts_are_messages_with_chat(
    models, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }} and more{% endfor %}")
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "the end"}\n')
    encode, seen = Engine.encode, []

    def encoded(engine: Engine, prompt: Any) -> list[int]:
        seen.append((encode(engine, prompt), encode(engine, "the end and more")))
        return seen[-1][0]

    monkeypatch.setattr(Engine, "encode", encoded)
    arguments = ["--mode", "greedy", "--prompt-file", str(path), "--json", "--quiet"]
    assert audit(models, *arguments, "--chat", "--chat-template", str(template)) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "pass"
    assert seen[0][0] == seen[0][1]
    assert all(ids[: len(rendered)] == rendered for ids, rendered in seen), "contexts go on from the prompt"


def test_the_table_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "--table", "--verify", "block", "--time-limit", "0", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    configurations = [one["configuration"] for one in document["distribution"]]
    assert configurations == ["table model, block, k=1"], "the rest is beyond the time limit"
    assert (document["checked"]["runs"], document["checked"]["planned_runs"]) == (1, 2)
    assert document["distribution"][0]["draws"] == 500


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--verify", "typical"], "lossy by design"),
        (["--mode", "greedy,everything"], "names `everything`"),
        (["--mode", "gumbel", "--verify", "block"], "has nothing to check with `--verify block`"),
        (["--full"], "`--full` is for the table model"),
        (["--table", "--mode", "greedy"], "works only with `--mode sampled`"),
        (["--table", "--prompt-file", __file__], "has no effect with `--table`"),
        (["--table", "-t", "x"], "`--target` has no effect with `--table`"),
        (["--table", "-k", "3"], "`--num-speculative-tokens` has no effect with `--table`"),
        (["--table", "--num-prompts", "3"], "`--num-prompts` has no effect with `--table`"),
        (["--table", "--temperature", "1"], "`--temperature` has no effect with `--table`"),
        (["--table", "--k-values", "3"], "`--k-values` has no effect with `--table`"),
        (["--table", "--verify", "block", "--tree", "2,1"], "`block` judges chains alone"),
        (["--table", "--tree", "2,x"], "the tree `2,x` is not a shape"),
        (["--table", "--tree", "dynamic:65"], "`64` are possible"),
        (["--tree", "2,1,1", "-k", "2"], "is `3` deep, and `--num-speculative-tokens` is `2`"),
        (["--verify", "block", "--tree", "2,1"], "`block` judges chains alone"),
        (["--draft", "none"], "there is no draft to audit"),
        (["-k", "0"], "nothing to audit"),
        (["-k", "2", "--k-values", "1"], "give one of them"),
        (["--k-values", "1,x"], "not a list of whole numbers"),
        (["--k-values", "0"], "must be from 1 to 64"),
        (["--batch-sizes", "1000"], "must be from 1 to 64"),
        (["--prompt-file", "/nowhere/prompts.txt"], "cannot be read"),
        (["--time-limit", "-1"], "--time-limit"),
        (["--time-limit", "nan"], "--time-limit"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert run(["audit", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


def test_the_table_drafts_trees(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.measure.audit.audit.full_power_draws", lambda _: 60)
    assert run(["audit", "--table", "--time-limit", "0", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["checked"]["planned_runs"] == 16
    own = ["--verify", "traversal", "--tree", "3,1"]
    assert run(["audit", "--table", *own, "--json", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert_fits(document, AuditDocument)
    names = [f"table model, traversal, {what}" for what in ("k=1", "k=3", "tree 3", "tree 3,1")]
    assert [one["configuration"] for one in document["distribution"]] == names
    assert document["lossless"]["verify"] == "traversal"


def test_a_pair_with_trees_passes(models, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.measure.audit.audit.full_power_draws", lambda _: 60)
    given = ["--tree", "2,1", "--verify", "traversal", "--k-values", "2", "--json", "--quiet", "--time-limit", "60"]
    assert audit(models, *given) == 0
    document = json.loads(capsys.readouterr().out)
    assert {one["configuration"].split(", ", 1)[1] for one in document["distribution"]} == {
        *("traversal, k=1", "traversal, k=3"),
        *("traversal, tree 2", "traversal, tree 2,1"),
    }
