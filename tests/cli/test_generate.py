"""`generate` as a person meets it: what lands on stdout, what on stderr, what in the document, which exit code."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from schemas import assert_fits
from toy_engine import FailingLM, LetterTokenizer, toy_engine

from specdec_cli.cli.main import run
from specdec_cli.engine.engine import Engine
from specdec_cli.events import Noticed
from specdec_cli.measure.documents.generate import GenerateDocument
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import resolve_mode


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch):
    """Engines that the command made, of toys; the real loader is not called."""
    engines = []

    def load(recipe, *, trust_remote_code: bool = False, progress=None):
        speculation = recipe.speculation
        resolve_mode(speculation.verify, recipe.sampling.temperature)
        engine = toy_engine(speculation.num_speculative_tokens, recipe.engine.max_num_seqs, speculation.verify)
        engines.append(engine)
        progress("loading [toys]")
        return engine

    monkeypatch.setattr(Engine, "from_recipe", load)
    for name in ("NO_COLOR", "CI", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return engines


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch):
    """Gives the process bytes on standard input."""

    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    give(b"")
    return give


def generate(*arguments: str) -> int:
    return int(run(["generate", "-d", "ngram:min=1", *arguments]))


def expected(prompt: str, num: int = 20, **params) -> str:
    tokens = SamplingParams(max_new_tokens=num, **params)
    return toy_engine(k=0).generate([prompt], tokens)[0].text


def document_of(text: str) -> dict[str, Any]:
    document = json.loads(text)
    assert_fits(document, GenerateDocument)
    return document


def test_text_goes_to_stdout_and_the_table_to_stderr(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("ab ab", "-n", "20") == 0
    out, err = capsys.readouterr()
    assert out == expected("ab ab").rstrip("\n") + "\n" or out == expected("ab ab")
    assert "acceptance rate" in err
    assert "tokens/s" in err
    assert "\x1b" not in out + err
    assert "no target named: using the built-in target (builtin:target, draft ngram)" in err


def test_a_named_target_needs_no_word_about_it(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("ab", "-n", "5", "-t", "some/target") == 0
    assert "no target named" not in capsys.readouterr().err


def test_a_k_without_a_draft_is_said_to_do_nothing(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert int(run(["generate", "ab", "-n", "5", "-t", "some/target", "-k", "4"])) == 0
    assert "-k 4 has no effect: there is no draft" in capsys.readouterr().err
    assert generate("ab", "-n", "5", "-k", "4") == 0
    assert "has no effect" not in capsys.readouterr().err


def test_a_pair_of_drafts_is_named_by_both(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "ab", "-n", "5", "-d", "suffix+builtin:draft", "--compare"]) == 0
    err = capsys.readouterr().err
    assert "using the built-in pair (builtin:target, draft suffix+builtin:draft)" in err
    assert "with suffix+builtin:draft" in err


def test_quiet_leaves_stderr_to_errors(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("ab ab", "-n", "20", "--quiet", "--compare") == 0
    out, err = capsys.readouterr()
    assert out
    assert err == ""


def test_several_prompts_come_in_order_under_their_numbers(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("ab", "cd", "e", "-n", "12") == 0
    out = capsys.readouterr().out
    assert [line for line in out.split("\n") if line.startswith("###")] == ["### 1", "### 2", "### 3"]
    for place, prompt in enumerate(["ab", "cd", "e"], start=1):
        assert f"### {place}\n{expected(prompt, 12)}" in out


@pytest.mark.in_turn(0, every=4)
@pytest.mark.parametrize("lengths", sorted(permutations((1, 5, 30))), ids=str)
@pytest.mark.parametrize(
    "form",
    [(), ("--show-drafts",), ("--quiet",), ("--compare",), ("--compare", "--max-num-seqs", "2"), ("--json",)],
    ids=" ".join,
)
def test_prompts_that_end_in_any_order_are_shown_in_theirs(
    loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path, lengths, form
) -> None:
    path = tmp_path / "prompts.jsonl"
    prompts = ["ab ab", "cd", "ab ab ab"]
    rows = [{"prompt": text, "max_new_tokens": num} for text, num in zip(prompts, lengths, strict=True)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert generate("--prompt-file", str(path), *form) == 0
    out = capsys.readouterr().out
    texts = [expected(*row.values()) for row in rows]
    if "--json" in form:
        assert [output["text"] for output in document_of(out)["outputs"]] == texts
        return
    if "--show-drafts" in form:
        out = out.replace("[", "").replace("]", "")
    whole = [f"### {place}\n{text}" for place, text in enumerate(texts, start=1)]
    assert out == "\n".join(text if text.endswith("\n") else text + "\n" for text in whole)


@pytest.mark.parametrize("length", [1, 12])
def test_prompts_that_end_together_are_shown(loaded, capsys: pytest.CaptureFixture[str], piped, length: int) -> None:
    piped(b"ab\ncd\ne\n")
    assert generate("--prompt-file", "-", "-n", str(length)) == 0
    out = capsys.readouterr().out
    for place, prompt in enumerate(["ab", "cd", "e"], start=1):
        assert f"### {place}\n{expected(prompt, length)}" in out


def test_the_document_is_the_only_thing_on_stdout(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("ab ab", "cd", "-n", "20", "--json", "--logprobs", "2") == 0
    out, err = capsys.readouterr()
    document = document_of(out)
    assert [output["text"] for output in document["outputs"]] == [expected("ab ab"), expected("cd")]
    assert [output["prompt"] for output in document["outputs"]] == ["ab ab", "cd"]
    assert document["totals"]["speculative"]["num_emitted_tokens"] == 38
    assert document["lossless"] == {
        "promised": True,
        "verify": "greedy",
        "checked_tokens": None,
        "mismatches": None,
        "first_divergence": None,
    }
    assert document["recipe"]["draft"]["method"] == "ngram"
    assert len(document["outputs"][0]["logprobs"]) == 20
    assert len(document["outputs"][0]["logprobs"][0]["top"]) == 2
    assert "compare" not in document
    assert "acceptance rate" in err


def test_typical_says_that_it_is_lossy(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("ab ab", "-n", "5", "--json", "--verify", "typical", "--temperature", "1") == 0
    document = document_of(capsys.readouterr().out)
    assert document["lossless"]["promised"] is False
    assert all("lossless" not in output for output in document["outputs"]), "it is an object, and the document's"


def test_typical_at_temperature_zero_is_greedy_and_promises_the_targets_tokens(
    loaded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate("ab ab", "cd", "-n", "20", "--json", "--compare", "--verify", "typical") == 0
    document = document_of(capsys.readouterr().out)
    lossless = document["lossless"]
    assert (lossless["promised"], lossless["verify"], lossless["mismatches"]) == (True, "typical", 0)
    assert lossless["checked_tokens"] == 40


def test_typical_says_so_on_stderr_too(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("ab ab", "-n", "5", "--verify", "typical", "--temperature", "1") == 0
    assert "lossless: false" in capsys.readouterr().err


def test_rows_of_a_prompt_file_bring_their_own_values(
    loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "ab", "id": "x", "category": "story", "max_new_tokens": 3}\n'
        '{"turns": ["ab", "later"], "seed": 7}\n{"prompt": "ab"}\n'
    )
    assert generate("--prompt-file", str(path), "-n", "20", "--temperature", "1", "--json") == 0
    outputs = document_of(capsys.readouterr().out)["outputs"]
    assert [output["index"] for output in outputs] == [0, 1, 2]
    assert (outputs[0]["id"], outputs[0]["category"], outputs[0]["completion_tokens"]) == ("x", "story", 3)
    assert "id" not in outputs[1]
    engine = toy_engine()
    alone = engine.generate([[*engine.encode("ab")]], [SamplingParams(20, 1.0, seed=7, index=0)])
    assert outputs[1]["token_ids"] == alone[0].token_ids
    third = toy_engine().generate([[*engine.encode("ab")]], [SamplingParams(20, 1.0, seed=0, index=2)])
    assert outputs[2]["token_ids"] == third[0].token_ids


def test_a_comparison_says_speedup_and_equality(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("ab ab", "cd", "e", "-n", "20", "--json", "--compare", "--max-num-seqs", "2") == 0
    out, err = capsys.readouterr()
    document = document_of(out)
    assert document["compare"]["equal"] is True
    assert document["compare"]["speedup"]["decode"]["pairs"] == 2
    assert document["compare"]["plain"]["speculative"]["num_drafts"] == 0
    assert document["compare"]["plain"]["speculative"]["num_emitted_tokens"] == 57
    assert document["lossless"]["checked_tokens"] == 60
    assert document["lossless"]["mismatches"] == 0
    assert "tokens equal (60 checked)" in err
    assert "decode speed-up" in err


def test_a_comparison_streams_each_text_once(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("ab ab", "-n", "20", "--compare") == 0
    assert capsys.readouterr().out.strip("\n") == expected("ab ab").strip("\n")


@pytest.mark.parametrize(("verify", "equal"), [("block", None), ("gumbel", True)])
def test_sampled_tokens_are_compared_where_the_mode_promises_it(
    loaded, capsys: pytest.CaptureFixture[str], verify: str, equal: bool | None
) -> None:
    arguments = ("-n", "20", "--json", "--compare", "--temperature", "1", "--verify", verify)
    assert generate("ab ab", "cd", *arguments) == 0
    document = document_of(capsys.readouterr().out)
    assert document["compare"]["equal"] is equal
    assert document["lossless"]["checked_tokens"] == (None if equal is None else 40)


def test_stop_strings_and_control_characters(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = expected("ab ab", 40)
    stop = text[4:7]
    assert generate("ab ab", "-n", "40", "--stop", stop, "--quiet") == 0
    assert capsys.readouterr().out.rstrip("\n") == text[: text.index(stop)].rstrip("\n")
    monkeypatch.setattr("toy_engine.LETTERS", "\0abcd\x1bfgh .\n")
    assert generate("ab ab", "-n", "60", "--quiet", "--temperature", "2") == 0
    assert "\x1b" not in capsys.readouterr().out


def test_show_drafts_puts_accepted_tokens_in_brackets(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("ab ab ab", "-n", "40", "--show-drafts") == 0
    out, err = capsys.readouterr()
    assert out.replace("[", "").replace("]", "").strip("\n") == expected("ab ab ab", 40).strip("\n")
    accepted = toy_engine().generate(["ab ab ab"], SamplingParams(40))[0].speculative.num_accepted_tokens
    assert out.count("[") == accepted > 0
    assert "[drafted and accepted]" in err


def test_chat_and_system_build_messages(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("ab", "-n", "5", "--system", "cd", "--json") == 0
    document = document_of(capsys.readouterr().out)
    tokens = LetterTokenizer().chat([{"role": "system", "content": "cd"}, {"role": "user", "content": "ab"}])
    assert document["outputs"][0]["prompt_tokens"] == len(tokens)
    assert document["outputs"][0]["prompt"] == "ab"


def test_output_is_written_and_not_overwritten(loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert generate("ab", "-n", "5", "--output", str(path)) == 0
    assert capsys.readouterr().out.strip("\n") == expected("ab", 5).strip("\n")
    assert document_of(path.read_text())["outputs"][0]["text"] == expected("ab", 5)
    before = path.read_bytes()
    assert generate("ab", "-n", "6", "--output", str(path)) == 2
    assert path.read_bytes() == before
    assert generate("ab", "-n", "6", "--output", str(path), "--force") == 0
    assert document_of(path.read_text())["outputs"][0]["completion_tokens"] == 6


def test_standard_input_is_one_prompt_or_lines(loaded, capsys: pytest.CaptureFixture[str], piped) -> None:
    piped(b"\xef\xbb\xbfab ab\n")
    assert generate("-n", "5", "--json") == 0
    assert document_of(capsys.readouterr().out)["outputs"][0]["prompt"] == "ab ab"
    piped(b"ab\r\ncd\n")
    assert generate("-n", "5", "--json", "-") == 0
    assert document_of(capsys.readouterr().out)["outputs"][0]["prompt"] == "ab\r\ncd"
    piped(b"ab\r\ncd\n")
    assert generate("-n", "5", "--json", "--prompt-file", "-") == 0
    assert [output["prompt"] for output in document_of(capsys.readouterr().out)["outputs"]] == ["ab", "cd"]
    piped(b'{"prompt": "ab", "id": 3}\n')
    assert generate("-n", "5", "--json", "--prompt-file", "-") == 0
    assert document_of(capsys.readouterr().out)["outputs"][0]["id"] == 3


def test_ctrl_c_keeps_what_there_is(
    loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    calls = 0
    from specdec_cli.report.view import RunView

    watch = RunView.watch

    def press(self, arm, event) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            os.kill(os.getpid(), signal.SIGINT)
        watch(self, arm, event)

    monkeypatch.setattr(RunView, "watch", press)
    before = signal.getsignal(signal.SIGINT)
    assert generate("ab", "cd", "-n", "400", "--output", str(path)) == 130
    outputs = document_of(path.read_text())["outputs"]
    assert [output["finish_reason"] for output in outputs] == ["abort", "abort"]
    assert 1 < outputs[0]["completion_tokens"] < 400
    out, err = capsys.readouterr()
    assert outputs[0]["text"] in out
    assert outputs[1]["text"] in out
    assert "interrupted" in err
    assert signal.getsignal(signal.SIGINT) is before


def test_a_notice_is_said_once(loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_cli.engine.engine import Engine

    step = Engine._step
    monkeypatch.setattr(Engine, "_step", lambda self: [*step(self), Noticed(0, "past the draft's context")])
    assert generate("ab", "-n", "9") == 0
    assert capsys.readouterr().err.count("past the draft's context") == 1


def test_the_plan_is_shown_and_nothing_loaded(loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("ab", "cd", "-k", "3", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "# would decode 2 prompts" in out
    assert "num_speculative_tokens: 3" in out
    assert "# flag --num-speculative-tokens" in out
    assert generate("ab", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_prompts"] == 1
    assert loaded == []


BAD = [
    ([""], "the prompt is empty"),
    (["ab", " "], "prompt 2 of 2 is empty"),
    ([os.fsdecode(b"a\xff")], "not valid Unicode"),
    (["-", "-"], "`-` stands twice"),
    ([], "the prompt on standard input is empty"),
    (["ab", "--prompt-file", "{empty}"], "as arguments and with --prompt-file"),
    (["--prompt-file", "{empty}"], "has no prompt"),
    (["--prompt-file", "{missing}"], "No such file"),
    (["--prompt-file", "{folder}"], "Is a directory"),
    (["--prompt-file", "{latin}"], "not valid UTF-8"),
    (["--prompt-file", "{broken}"], "broken.jsonl:2: not a JSON object"),
    (["ab", "--show-drafts", "--json"], "--show-drafts"),
    (["ab", "--logprobs", "2"], "`--logprobs` is for the JSON document"),
    (["ab", "--compare", "-k", "0"], "nothing to compare"),
    (["ab", "--compare", "-d", "none"], "nothing to compare"),
    (["ab", "--prediction", "cd"], "`--prediction` is read by the draft `prediction` alone"),
    (["ab", "--prediction", " "], "`--prediction` is empty"),
    (["a" * 600], "the prompt has `600` tokens"),
    (["ab", "a" * 600], "prompt 2: the prompt has `600` tokens"),
    (["ab", "--logit-bias", "99=1"], "logit_bias names token `99`"),
    (["ab", "--stop-token-id", "99"], "stop_token_ids names token `99`"),
    (["ab", "--stop", ""], "stop"),
    (["ab", "--verify", "greedy", "--temperature", "1"], "does not fit"),
    (["ab", "--output", "{folder}"], "is a folder"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_input_is_one_sentence_and_exit_2(
    loaded, capsys: pytest.CaptureFixture[str], piped, tmp_path: Path, arguments, said
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    names = {name: str(tmp_path / f"{name}.txt") for name in ("empty", "missing", "latin")}
    names |= {"folder": str(tmp_path), "broken": str(tmp_path / "broken.jsonl")}
    before = sorted(tmp_path.iterdir())
    assert generate(*(argument.format(**names) if "{" in argument else argument for argument in arguments)) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert "Traceback" not in err
    assert sum(line.startswith("error: ") for line in err.split("\n")) == 1
    assert out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_a_prediction_becomes_the_draft(capsys: pytest.CaptureFixture[str]) -> None:
    assert int(run(["generate", "ab", "--prediction", "cd", "--dry-run"])) == 0
    out = capsys.readouterr().out
    assert "method: prediction" in out
    assert "text: cd" in out


def test_a_reader_that_goes_away_makes_no_noise(
    loaded, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert generate("ab", "-n", "50") == 0
        monkeypatch.undo()
    assert "Traceback" not in capfd.readouterr().err


def test_a_document_is_written_where_nobody_reads_the_text(
    loaded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert generate("ab", "cd", "-n", "50", "--output", str(tmp_path / "out.json")) == 0
        monkeypatch.undo()
    document = document_of((tmp_path / "out.json").read_text())
    assert [output["completion_tokens"] for output in document["outputs"]] == [50, 50]


def test_special_tokens_that_are_shown_are_cut_as_they_are_shown(
    loaded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    real = LetterTokenizer.detokenizer
    monkeypatch.setattr(LetterTokenizer, "detokenizer", lambda self, skip=True: asked.append(skip) or real(self))
    for skips in (True, False):
        assert generate("ab", "-n", "5", "--show-drafts", "--set", f"sampling.skip_special_tokens={skips}".lower()) == 0
    assert asked == [True, False]


def test_a_prediction_leaves_the_recipe_s_other_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("draft: {method: prediction, max: 8, min: 3, text: old}\n")
    assert int(run(["generate", "ab", "-r", str(path), "--prediction", "cd", "--dry-run", "--json"])) == 0
    draft = json.loads(capsys.readouterr().out)["recipe"]["draft"]
    assert (draft["text"], draft["max"], draft["min"]) == ("cd", 8, 3)


@pytest.mark.slow
def test_plain_text_builds_no_model_of_a_document() -> None:
    program = (
        "import sys; from specdec_cli.cli.main import run; code = run(['generate', 'hi', '-n', '4', '--quiet']);"
        "assert not [name for name in sys.modules if name.startswith('specdec_cli.measure.documents')]; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_plan_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from specdec_cli.cli.main import run; code = run(['generate', 'hi', '--dry-run']);"
        "assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_built_in_pair_prints_one_valid_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert int(run(["generate", "Once upon a time", "-k", "4", "-n", "24", "--json"])) == 0
    out, err = capsys.readouterr()
    document = document_of(out)
    assert document["recipe"]["draft"]["model"] == "builtin:draft"
    assert document["outputs"][0]["completion_tokens"] > 0
    assert document["totals"]["speculative"]["num_draft_tokens"] > 0
    assert "no target named: using the built-in pair (builtin:target, draft builtin:draft)" in err


@pytest.mark.parametrize("skips", ["true", "false"])
def test_49_7_a_stop_string_that_is_a_special_token_stops(capsys: pytest.CaptureFixture[str], skips: str) -> None:
    given = ("--ignore-eos", "--logit-bias", "2=100", "--stop", "</s>", "--min-tokens", "3")
    show = ("--set", f"sampling.skip_special_tokens={skips}")
    assert int(run(["generate", "Once", "-t", "builtin:target", "-d", "none", "-n", "6", "--json", *given, *show])) == 0
    output = document_of(capsys.readouterr().out)["outputs"][0]
    assert (output["token_ids"], output["finish_reason"], output["stop_reason"]) == ([2, 2, 2], "stop", "</s>")
    assert output["text"] == ("" if skips == "true" else "</s></s>")


@pytest.mark.slow
def test_point_4_no_compiler_is_one_line_with_its_remedy(tmp_path: Path) -> None:
    environment = os.environ | {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "specdec_cli", "generate", "Once", "-n", "4"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    (line,) = [line for line in done.stderr.splitlines() if "compiler" in line]
    assert line.startswith("note: no C++ compiler `no-such-compiler`: transformers' forward runs for target and draft")
    assert line.endswith("or name one with CXX")


@pytest.mark.slow
def test_point_4_quiet_says_nothing_of_a_missing_compiler(tmp_path: Path) -> None:
    environment = os.environ | {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "specdec_cli", "generate", "Once", "-n", "4", "--quiet"]
    assert subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stderr == ""


def test_a_prompt_that_fails_ends_no_other(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "from_recipe", lambda *_, **__: toy_engine(target=FailingLM("fg")))
    assert generate("ab", "fg", "cd", "-n", "20") == 1
    out, err = capsys.readouterr()
    first, second, third = (part.partition("\n")[2].strip("\n") for part in out.split("### ")[1:])
    assert (first, third) == (expected("ab").strip("\n"), expected("cd").strip("\n"))
    assert len(second) < 20
    assert "acceptance rate" in err, "what was decoded is summed up"
    assert re.search("^error: 1 of 3 prompts failed; prompt 2: .*logit", err, re.MULTILINE)


@pytest.mark.parametrize("more", [(), ("--compare",)])
def test_a_failed_prompt_has_its_error_in_the_document(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more
) -> None:
    monkeypatch.setattr(Engine, "from_recipe", lambda *_, **__: toy_engine(target=FailingLM("fg")))
    assert generate("fg", "ab", "-n", "20", "--json", *more) == 1
    one, other = document_of(capsys.readouterr().out)["outputs"]
    assert (one["finish_reason"], other["finish_reason"]) == (None, "length")
    assert "logit" in one["error"]
    assert "error" not in other


def test_one_prompt_alone_fails_with_its_own_error(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "from_recipe", lambda *_, **__: toy_engine(target=FailingLM("fg")))
    assert generate("fg", "-n", "20") == 1
    assert "prompts failed" not in capsys.readouterr().err


def test_many_failures_are_counted_and_the_first_named(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "from_recipe", lambda *_, **__: toy_engine(target=FailingLM("f")))
    assert generate(*(f"f{letter}" for letter in "abcdefg"), "-n", "20", "--quiet") == 1
    err = capsys.readouterr().err
    assert "error: 7 of 7 prompts failed; prompt 1: " in err
    assert "error: prompt 5: " in err
    assert "prompt 6: " not in err
    assert "error: and 2 more" in err
