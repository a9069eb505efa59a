"""`compare-drafts --engine vllm` with a stand-in for vLLM: drafts ranked, counted, and refused by name."""

import json
import os
import shlex
from typing import Any

import pytest
from fake_vllm import command_of
from schemas import assert_fits

from specdec_cli.cli.main import run
from specdec_cli.measure.documents.compare_drafts import CompareDocument

pytestmark = pytest.mark.usefixtures("nothing_left")
ARGUMENTS = ["compare-drafts", "--engine", "vllm", "--engine-command", shlex.join(command_of(os.getpid())), "-n", "9"]
DRAFTS = ["-d", "builtin:draft", "-d", "ngram", "-d", "none"]


def test_drafts_are_compared_with_one_plain_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "differs,shared")
    more = [
        "--num-prompts",
        "1",
        "--repeats",
        "1",
        "--quiet",
        "--json",
        "--set",
        "speculation.num_speculative_tokens=3",
    ]
    assert run([*ARGUMENTS, *DRAFTS, *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert_fits(found, CompareDocument)
    rows = {row["draft"]: row for row in found["rows"]}
    assert set(rows) == {"builtin:draft", "ngram", "none"}
    for name in ("builtin:draft", "ngram"):
        assert (rows[name]["best_k"], rows[name]["predicted"], rows[name]["memory_bytes"]) == (3, None, None)
        assert rows[name]["speculative"]["num_accepted_tokens"] == 5
        assert rows[name]["speculative"]["num_drafts"] == 3
    assert found["engine"]["acceptance_from"] == "answers"
    assert found["plan"]["order"] == "A A B B"
    assert set(found["engine"]["commands"]) == {"without a draft", "builtin:draft k=3", "ngram k=3"}
    assert [one["arm"] for one in found["engine"]["differences"]] == ["builtin:draft k=3", "ngram k=3"]
    assert any(notice.startswith("ngram k=3: prompt 1 leaves the plain text at token 9") for notice in found["notices"])


@pytest.mark.parametrize("option", [["--k-max", "3"], ["--exhaustive"], ["--trace", "x.npz"]])
def test_what_another_engine_does_not_do_is_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ARGUMENTS, *DRAFTS, *option]) == 2
    assert f"`{option[0]}` has no effect with --engine vllm" in capsys.readouterr().err


def test_a_draft_that_it_lacks_is_refused_before_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ARGUMENTS, "-d", "ngram", "-d", "self-int8"]) == 2
    assert "vLLM has no draft like an int8 copy of the target" in capsys.readouterr().err


def test_a_dry_run_shows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare-drafts", "--engine", "vllm", *DRAFTS, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("vllm serve") == 3
