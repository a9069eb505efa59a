"""`serve --engine`: the engine's command line, its address and its key, and the settings that it does not have."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.cli.main import run

WORDS = ["serve", "-r", "builtin", "--engine", "vllm"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The command line and the environment that replace this process."""
    calls: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda _, words, environment: calls.append((words, environment)))
    return calls


def test_the_engine_serves_at_our_address_with_our_key(started: list[Any]) -> None:
    words = [*WORDS, "--engine-command", sys.executable, "--host", "0.0.0.0", "--port", "8123"]
    assert run(words) == 2, "no key"
    assert run([*words, "--api-key", "a", "--api-key", "b"]) == 2, "vLLM takes one"
    assert not started
    assert run([*words, "--api-key", "secret"]) == 0
    ((words, environment),) = started
    assert words[:2] == (sys.executable, "serve")
    assert words[-4:] == ("--host", "0.0.0.0", "--port", "8123")
    assert environment["VLLM_API_KEY"] == "secret"


def test_a_dry_run_prints_the_engines_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--dry-run"]
    assert run([*words, "--engine-command", "/opt/vllm/bin/vllm", "--engine-args", "--enforce-eager"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("/opt/vllm/bin/vllm serve ")
    assert printed.endswith("--enforce-eager --per-request-spec-decode-metrics summary\n")
    assert run([*words, "--per-request-spec-decode-metrics", "detailed"]) == 0
    assert capsys.readouterr().out.count("--per-request-spec-decode-metrics detailed") == 1
    assert run([*words, "-d", "none", "--per-request-spec-decode-metrics", "detailed"]) == 0
    assert "per-request" not in capsys.readouterr().out
    assert run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"].startswith("vllm serve ")


def test_settings_that_the_engine_lacks_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORDS, "--max-stop", "3"]) == 2
    assert "`serve.max_stop` has no effect with --engine vllm" in capsys.readouterr().err
    assert run([*WORDS, "--engine-command", "/nowhere/vllm", "--port", "0"]) == 1
    assert "`/nowhere/vllm` is no program that can be run" in capsys.readouterr().err


def test_llama_cpps_wheel_takes_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "fake_wheel")
    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    from specdec_cli.measure.elsewhere import xllamacpp_server

    assert xllamacpp_server.params_of(xllamacpp_server.parser().parse_args([])).api_keys == ["secret"]
