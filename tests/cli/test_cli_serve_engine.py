"""`serve --engine vllm` with a stand-in for vLLM: what it says on the terminal, to the end."""

import os
import shlex
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from fake_vllm import command_of

from specdec_cli.cli.main import run
from specdec_cli.measure.elsewhere.launch import free_port

pytestmark = pytest.mark.usefixtures("nothing_left")
SECONDS = 60.0


def ask(port: int) -> None:
    """One request, as soon as the server listens; the engine behind it dies of it."""
    body = {"model": "m", "prompt": "one two", "max_tokens": 4, "stream": True}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS, trust_env=False) as client:
        while True:
            with suppress(httpx.HTTPError):
                if client.get("/health").status_code == 200:
                    break
        with suppress(httpx.HTTPError):
            client.post("/v1/completions", json=body)


def test_an_engine_that_dies_is_told_once_and_the_model_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where its log stays
    monkeypatch.setattr("specdec_cli.serve.proxy.server._LAST_WORDS_SECONDS", 0.0)
    monkeypatch.setenv("FAKE_VLLM", "crash=1")
    monkeypatch.chdir(tmp_path)
    Path("t").mkdir()
    port = free_port()
    asking = threading.Thread(target=ask, args=(port,), daemon=True)
    asking.start()
    words = ["serve", "-t", "./t", "-d", "ngram", "--engine", "vllm", "--port", str(port)]
    assert run([*words, "--engine-command", shlex.join(command_of(os.getpid()))]) == 1
    asking.join(SECONDS)
    told = capsys.readouterr().err
    assert told.count("\nvLLM: torch.OutOfMemoryError: no room left") == 1
    assert f"serving {tmp_path / 't'} at http://127.0.0.1:{port}, with vLLM behind it" in told
