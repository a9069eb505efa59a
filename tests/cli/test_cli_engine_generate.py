"""`generate --engine vllm` with a stand-in for vLLM: text, counts of each prompt, refusals."""

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import command_of
from schemas import assert_fits

from specdec_cli.cli.main import run
from specdec_cli.measure.documents.generate import GenerateDocument

pytestmark = pytest.mark.usefixtures("nothing_left")
ENGINE = ["--engine", "vllm", "--engine-command", shlex.join(command_of(os.getpid()))]
ARGUMENTS = ["generate", *ENGINE, "-n", "9", "-k", "3"]


def test_a_prompt_s_text_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ARGUMENTS, "the cat sat"]) == 0
    shown = capsys.readouterr()
    assert shown.out == " the cat sat the cat sat the cat sat\n"
    assert "55.6%" in shown.err


def test_each_prompt_has_its_own_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "shared")
    assert run([*ARGUMENTS, "--json", "--quiet", "the cat sat", "a dog"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert_fits(found, GenerateDocument)
    assert [one["text"].split()[:2] for one in found["outputs"]] == [["the", "cat"], ["a", "dog"]]
    for one in found["outputs"]:
        assert (one["completion_tokens"], one["finish_reason"]) == (9, "length")
        assert one["speculative"]["num_accepted_tokens"] == 5
    assert [one["prompt_tokens"] for one in found["outputs"]] == [3, 2]
    assert found["totals"]["speculative"]["num_drafts"] == 6
    assert found["lossless"]["verify"] == "greedy"
    assert (found["engine"]["version"], found["engine"]["acceptance_from"]) == ("0.33.0", "answers")


def test_an_engine_that_dies_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "crash=1")
    assert run([*ARGUMENTS, "--quiet", "the cat sat"]) == 1
    said = capsys.readouterr().err
    assert "vLLM ended while it was needed (killed by SIGKILL): torch.OutOfMemoryError: no room left" in said
    Path(said.split("its whole log is in ")[1].strip()).unlink()


def test_the_log_of_an_engine_that_dies_begins_a_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a terminal, where both streams are one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("FAKE_VLLM", "cut=2")
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    assert run([*ARGUMENTS, "the cat sat"]) == 1
    lines = capfd.readouterr().out.splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith(" the cat"))
    assert "vLLM" not in lines[place]
    assert lines[place + 1].startswith("vLLM: vLLM API server version")


@pytest.mark.parametrize("option", [["--compare"], ["--show-drafts"], ["--logprobs", "2", "--json"]])
def test_options_without_effect_are_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ARGUMENTS, *option, "the cat"]) == 2
    assert f"`{option[0]}` has no effect with --engine vllm" in capsys.readouterr().err


def test_a_grammar_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ARGUMENTS, "--regex", "a+", "the cat"]) == 2
    assert "`structured.regex` has no effect with --engine vllm" in capsys.readouterr().err


def test_a_dry_run_shows_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--engine", "vllm", "--dry-run", "the cat"]) == 0
    assert "# would decode 1 prompt with vllm serve" in capsys.readouterr().out
