"""Our server in front of another engine's: what passes, what is refused, and how both end."""

import http.client
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_server import SECONDS, until

from specdec_cli.cli.main import run
from specdec_cli.errors import ExitCode, SpecdecError
from specdec_cli.measure.elsewhere.engine_process import EngineError, EngineProcess
from specdec_cli.measure.elsewhere.launch import Launch
from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.http.server import listen
from specdec_cli.serve.proxy.app import Front
from specdec_cli.serve.proxy.fields import REFUSED
from specdec_cli.serve.proxy.server import FrontServer
from specdec_cli.serve.proxy.upstream import Upstream
from specdec_cli.serve.settings import Settings

FAKE = Path(__file__).parents[2] / "fake_vllm.py"
DRAFTS = ("--speculative-config", '{"num_speculative_tokens": 3}', "--per-request-spec-decode-metrics", "summary")
BODY = {"model": "model", "prompt": "one two three", "max_tokens": 9, "stream": True}
ENDLESS = BODY | {"max_tokens": 200_000}  # more than the sockets between hold


def running(group_id: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getpgid(one.pid) == group_id and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one.pid)
    return found


class LiveFront:
    """A front, its engine, and what its end gave."""

    def __init__(self, server: FrontServer, engine: EngineProcess) -> None:
        self.server, self.engine = server, engine
        self.ended: ExitCode | Exception | None = None

    def connect(self) -> http.client.HTTPConnection:
        host, port = self.server.listener.getsockname()[:2]
        return http.client.HTTPConnection(host, port, timeout=SECONDS)

    def ask(self, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, str]:
        connection = self.connect()
        try:
            headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


@contextmanager
def front(ways: str = "", keys: tuple[str, ...] = (), places: int = 8, **serve: Any) -> Iterator[LiveFront]:
    """A front before a fake engine until the block ends, or until it ended by itself."""
    launch = Launch(
        "vLLM", (sys.executable, "-S", str(FAKE), "serve", "model", *DRAFTS), environment={"FAKE_VLLM": ways}
    )
    engine = EngineProcess(launch, timeout_s=SECONDS)

    def ended() -> SpecdecError | None:
        try:
            engine.check(patience_s=1.0)
        except SpecdecError as error:
            return error
        return None

    with engine as url:
        settings = Settings(Serve(port=0, drain_timeout_seconds=1.0, **serve), keys)
        described = {"draft": "d", "num_speculative_tokens": 3, "tree": None, "per_request": False}
        state = Front(Upstream(url, "vLLM", ended), settings, REFUSED["vllm"], described, places)
        live = LiveFront(FrontServer(state, listen("127.0.0.1", 0), ended), engine)

        def serve_forever() -> None:
            try:
                live.ended = live.server.serve_forever()
            except Exception as error:
                live.ended = error

        thread = threading.Thread(target=serve_forever)
        thread.start()
        try:
            until(lambda: live.server.started)
            yield live
        finally:
            live.server.should_exit = True
            thread.join(SECONDS)
            assert not thread.is_alive(), "the front does not end"


def test_the_engines_routes_and_our_page() -> None:
    with front() as live:
        assert json.loads(live.ask("GET", "/health")[1]) == {"status": "ok"}
        (model,) = json.loads(live.ask("GET", "/v1/models")[1])["data"]
        assert (model["id"], model["speculative"]["draft"], model["speculative"]["per_request"]) == (
            "model",
            "d",
            False,
        )
        assert json.loads(live.ask("GET", "/version")[1])["version"] == "0.33.0"
        assert "vllm:generation_tokens_total" in live.ask("GET", "/metrics")[1]
        assert "<!doctype html>" in live.ask("GET", "/")[1].lower()
        assert live.ask("POST", "/reset_prefix_cache", {})[0] == 404, "routes for the engine's owner stay inside"


def test_a_stream_passes_byte_by_byte_with_the_acceptance_of_its_request() -> None:
    with front() as live:
        status, text = live.ask("POST", "/v1/completions", BODY)
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    assert (status, text.splitlines()[-2]) == (200, "data: [DONE]")
    assert "".join(one["choices"][0]["text"] for one in events[:-1]).split() == ["one", "two", "three"] * 3
    assert events[-1]["metrics"]["speculative_decoding"] == {"num_draft_tokens": 9, "num_accepted_draft_tokens": 5}


def test_a_client_that_leaves_ends_its_request_at_the_engine() -> None:
    with front() as live:
        connection = live.connect()
        connection.request("POST", "/v1/completions", json.dumps(ENDLESS), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.read(6) == b"data: "
        answer.close()
        connection.close()
        until(lambda: 'vllm:aborted_total{model_name="model"} 1' in live.ask("GET", "/metrics")[1])


def test_an_engine_that_is_killed_ends_its_streams_and_the_server_with_its_reason() -> None:
    with front("cut=3") as live:
        status, text = live.ask("POST", "/v1/completions", ENDLESS)
        last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
        assert (status, last["error"]["code"]) == (200, "engine_ended")
        assert "vLLM ended while it was needed (killed by SIGKILL)" in last["error"]["message"]
        until(lambda: live.ended is not None)
        group = live.engine.group_id
    assert isinstance(live.ended, EngineError)
    assert group is not None
    assert not running(group)


def test_fields_that_the_engine_would_pass_over_are_refused_by_name() -> None:
    with front() as live:
        for field, value in (("speculative", {"num_speculative_tokens": 2}), ("prediction", {"content": "x"})):
            status, text = live.ask("POST", "/v1/completions", BODY | {field: value})
            assert (status, json.loads(text)["error"]["param"]) == (400, field)
        assert live.ask("POST", "/v1/completions", BODY | {"speculative": None})[0] == 200


def test_keys_and_places_are_the_fronts() -> None:
    with front(keys=("secret",), places=0) as live:
        assert live.ask("POST", "/v1/completions", BODY)[0] == 401
        status, text = live.ask("POST", "/v1/completions", BODY, key="secret")
        assert (status, json.loads(text)["error"]["code"]) == (429, "queue_full")
        assert live.ask("GET", "/v1/models", key="secret")[0] == 200


def test_an_answer_that_takes_too_long_is_ended() -> None:
    with front(request_timeout_seconds=0.05) as live:
        status, text = live.ask("POST", "/v1/completions", ENDLESS)
        body = text.strip().splitlines()[-1].removeprefix("data: ")
        assert status in (200, 504)
        assert json.loads(body)["error"]["code"] == "timeout"


def test_a_dry_run_prints_the_engines_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "-r", "builtin", "--engine", "vllm", "--dry-run"]
    assert run([*words, "--engine-command", "/opt/vllm/bin/vllm", "--engine-args", "--enforce-eager"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("/opt/vllm/bin/vllm serve ")
    assert printed.endswith("--enforce-eager --per-request-spec-decode-metrics summary\n")
    assert run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"].startswith("vllm serve ")


def test_settings_that_neither_has_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "-r", "builtin", "--engine", "vllm"]
    assert run([*words, "--max-stop", "3"]) == 2
    assert "`serve.max_stop` has no effect with --engine vllm" in capsys.readouterr().err
    assert run([*words, "--engine-command", "/nowhere/vllm", "--port", "0"]) == 1
    assert "`/nowhere/vllm` is no program that can be run" in capsys.readouterr().err
