"""`specdec serve` at the terminal: the seed case's command line, what is refused, and before what."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from toy_engine import toy_engine
from typed import not_none, stand_in

from specdec_cli.cli import serve as command
from specdec_cli.cli.main import run
from specdec_cli.cli.shared import Shared, draft_methods
from specdec_cli.errors import ExitCode
from specdec_cli.recipe import resolve
from specdec_cli.serve.http.server import Server, listen
from specdec_cli.serve.models import Model, Models
from specdec_cli.serve.request.parameters import Defaults

SEED = [
    "serve", "--model", "builtin:target", "--speculative-model", "builtin:draft", "--num-speculative-tokens", "3",
    "--speculative-draft-tensor-parallel-size", "1", "--tensor-parallel-size", "1", "--host", "0.0.0.0",
    "--dtype", "auto", "--gpu-memory-utilization", "0.9", "--served-model-name", "test_server_demo",
    "--trust-remote-code", "--insecure-no-auth",
]  # fmt: skip


def test_the_seed_cases_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SEED, "--port", "9999", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "would serve test_server_demo" in shown
    assert re.search(r"port: 9999 +# flag --port", shown)


def test_a_plan_as_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SEED, "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "specdec.serve-plan/1"
    [model] = document["models"]
    assert model["name"] == "test_server_demo"
    assert model["recipe"] == document["recipe"]
    assert model["origins"]["speculation.num_speculative_tokens"] == "flag --num-speculative-tokens"
    assert run([*SEED, "--json"]) == 2
    assert "`--json` and `--output` are for --dry-run" in capsys.readouterr().err


def test_other_machines_need_a_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_API_KEY", raising=False)
    assert run(["serve", "--host", "0.0.0.0", "--dry-run"]) == 2
    assert "--insecure-no-auth" in capsys.readouterr().err
    assert run(["serve", "--host", "0.0.0.0", "--api-key", "k", "--dry-run"]) == 0
    monkeypatch.setenv("SPECDEC_API_KEY", "k")
    assert run(["serve", "--host", "0.0.0.0", "--dry-run"]) == 0


def test_a_port_in_use_is_known_before_a_model_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_models", lambda *_: pytest.fail("a model was looked at"))
    taken = listen("127.0.0.1", 0)
    assert run(["serve", "--port", str(taken.getsockname()[1])]) == 1
    assert "cannot listen" in capsys.readouterr().err
    taken.close()


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_a_missing_extra_says_how_to_get_it(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == package else name)
    assert run(["serve"]) == 2
    said = capsys.readouterr().err
    assert f"`{package}`" in said
    assert "pip install 'specdec-cli[serve]'" in said


def test_sampling_that_nobody_named_is_openais() -> None:
    assert command.default_sampling(resolve(methods=draft_methods())) == Defaults()
    named = command.default_sampling(
        resolve(sets=["sampling.temperature=0", "sampling.top_k=5"], methods=draft_methods())
    )
    assert (named.params.temperature, named.params.top_k, named.named) == (0, 5, {"temperature", "top_k"})


def test_where_the_server_verifies_greedily_a_silent_request_is_greedy() -> None:
    greedy = command.default_sampling(resolve(sets=["speculation.verify=greedy"], methods=draft_methods()))
    assert (greedy.params.temperature, greedy.named, greedy.is_greedy) == (0, frozenset(), True)


def test_what_a_text_must_not_be_taken_for_is_said_when_a_model_is_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from specdec_cli.engine.engine import Engine

    monkeypatch.setattr(Engine, "from_recipe", lambda *_, **__: toy_engine())
    sets = ["speculation.verify=typical", "draft.load_format=dummy"]
    command._loader(resolve(sets=sets, methods=draft_methods()), Shared())()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("random weights" in text for text in said)
    assert any("`typical` is lossy" in text for text in said)


def test_a_repository_names_its_own_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("speculation: {num_speculative_tokens: 2}\n")
    file = tmp_path / "models.yaml"
    file.write_text("small: builtin\nlookup: mine.yaml\n")
    assert run(["serve", "--model-repository", str(file), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "would serve small" in shown
    assert "would serve lookup" in shown
    assert run(["serve", "--model-repository", str(file), "--dry-run", "--model", "x"]) == 2
    assert "leave out --target" in capsys.readouterr().err
    file.write_text("small: 3\n")
    assert run(["serve", "--model-repository", str(file), "--dry-run"]) == 2
    assert f"{file}:1:8" in capsys.readouterr().err
    file.write_text("{}\n")
    assert run(["serve", "--model-repository", str(file), "--dry-run"]) == 2


def test_the_seed_case_serves_and_ends_with_sigterm() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    arguments = [sys.executable, "-m", "specdec_cli.cli.main", *SEED, "--port", "0", "--log-format", "json"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            lines = iter(not_none(process.stderr))
            port = int(
                not_none(re.search(r":(\d+)\s*$", next(line for line in lines if line.startswith("serving"))))[1]
            )
            body = {
                "model": "test_server_demo", "max_tokens": 20, "top_k": -1, "top_p": 1, "temperature": 0,
                "ignore_eos": False, "stream": False,
                "messages": [
                    {"role": "system", "content": "You are a helpful assistant."},
                    {"role": "user", "content": "Who won the world series in 2020?"},
                    {"role": "assistant", "content": "The Los Angeles Dodgers won."},
                    {"role": "user", "content": "Where was it played?"},
                ],
            }  # fmt: skip
            with httpx.Client(trust_env=False, timeout=60) as client:
                answer = client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body).json()
            process.send_signal(signal.SIGTERM)
            said = "".join(lines)
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert answer["model"] == "test_server_demo"
    assert answer["choices"][0]["message"]["content"]
    assert "world series" not in said
    assert any(json.loads(line).get("status") == 200 for line in said.splitlines() if line.startswith("{"))


def test_a_repositorys_recipe_says_nothing_about_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("serve: {tool_call_parser: hermes, reasoning_parser: qwen3}\n")
    (tmp_path / "models.yaml").write_text("small: mine.yaml\n")
    assert run(["serve", "--model-repository", str(tmp_path / "models.yaml"), "--dry-run"]) == 0
    (tmp_path / "mine.yaml").write_text("serve: {port: 9000}\n")
    assert run(["serve", "--model-repository", str(tmp_path / "models.yaml"), "--dry-run"]) == 2
    assert "`serve.port`" in capsys.readouterr().err


def test_an_empty_key_is_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--api-key", "", "--dry-run"]) == 2
    assert "`--api-key` is empty" in capsys.readouterr().err


def test_an_end_while_a_model_loads_does_not_wait_for_the_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, codes = threading.Event(), threading.Event(), []

    def load() -> None:
        begun.set()
        goes_on.wait()
        raise RuntimeError("it was waited for")

    def interrupted(server):
        assert begun.wait(20)
        server.listener.close()
        return ExitCode.INTERRUPTED

    monkeypatch.setattr(
        command, "_models", lambda named, settings, shared: Models([Model("toy", stand_in(load), settings.serve)])
    )
    monkeypatch.setattr(Server, "serve_forever", interrupted)
    monkeypatch.setattr(os, "_exit", codes.append)
    assert run(["serve", "--port", "0", "--quiet"]) == ExitCode.INTERRUPTED
    assert codes == [ExitCode.INTERRUPTED]
    goes_on.set()


def test_several_served_names_are_all_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "builtin:target", "--served-model-name", "a", "--served-model-name", "b", "--dry-run"]
    assert run(words) == 0
    assert "would serve a, b\n" in capsys.readouterr().out
    assert run([*words, "--json"]) == 0
    [model] = json.loads(capsys.readouterr().out)["models"]
    assert (model["name"], model["names"]) == ("a", ["a", "b"])
    assert model["recipe"]["serve"]["served_model_name"] == ["a", "b"]
    assert model["origins"]["target.model"] == "argument MODEL"
    for said, names in [("served_model_name: a", "a"), ("served_model_name: [b, a]", "b, a")]:
        (tmp_path / "r.yaml").write_text(f"serve: {{{said}}}\n")
        assert run(["serve", "-r", str(tmp_path / "r.yaml"), "--dry-run"]) == 0
        assert f"would serve {names}\n" in capsys.readouterr().out
    assert run(["serve", "--served-model-name", "", "--dry-run"]) == 2


def test_a_positional_model_is_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "builtin:draft", "-d", "none", "--dry-run"]) == 0
    assert "would serve builtin:draft" in capsys.readouterr().out
    for words, said in [
        (["x", "--model", "y"], "two models are named: `x` and `--target y`"),
        (["x", "--served-model-name", "a", "b"], "`serve` takes one model, not `x`, `b`"),
        (["x", "--model-repository", "f"], "leave out MODEL"),
    ]:
        assert run(["serve", *words, "--dry-run"]) == 2
        assert said in capsys.readouterr().err


def test_a_key_variable_that_is_named_must_be_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SPECDEC_KEYS", raising=False)
    (tmp_path / "r.yaml").write_text("serve: {api_key_env: SPECDEC_KEYS}\n")
    for words in (["--api-key-env", "SPECDEC_KEYS"], ["-r", str(tmp_path / "r.yaml")]):
        assert run(["serve", *words, "--dry-run"]) == 2
        assert "`SPECDEC_KEYS`, which is not set" in capsys.readouterr().err
        monkeypatch.setenv("SPECDEC_KEYS", "k")
        assert run(["serve", *words, "--dry-run"]) == 0
        assert "SPECDEC_KEYS" not in capsys.readouterr().err
        monkeypatch.delenv("SPECDEC_KEYS")


def test_each_silent_request_of_a_server_with_a_negative_seed_draws_its_own() -> None:
    found = command.default_sampling(resolve(sets=["sampling.seed=-1"], methods=draft_methods()))
    assert found.named == frozenset()
    assert found.seed() != found.seed()
