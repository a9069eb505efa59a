"""Our server in front of another engine's: what passes, what is refused, and how both end."""

import http.client
import json
import os
import socket
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
from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.http import bodies
from specdec_cli.serve.http.server import listen
from specdec_cli.serve.proxy.app import Front
from specdec_cli.serve.proxy.fields import PROXIED
from specdec_cli.serve.proxy.server import FrontServer
from specdec_cli.serve.proxy.upstream import Upstream
from specdec_cli.serve.settings import Settings

FAKE = Path(__file__).parents[2] / "fake_vllm.py"
WHEEL = FAKE.parent / "fake_wheel"
SERVER = FAKE.parents[1] / "specdec_cli" / "measure" / "elsewhere" / "xllamacpp_server.py"
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
def front(
    ways: str = "", keys: tuple[str, ...] = (), places: int = 8, behind: str = "vllm", **serve: Any
) -> Iterator[LiveFront]:
    """A front before a fake engine until the block ends, or until it ended by itself."""
    words: tuple[str, ...] = ("env", f"FAKE_VLLM={ways}", sys.executable, "-S", str(FAKE), "serve", "model", *DRAFTS)
    if behind == "llamacpp":
        words = ("env", f"PYTHONPATH={WHEEL}", sys.executable, "-S", str(SERVER), "--model", "model", "--metrics")
    engine = EngineProcess("vLLM", words, timeout_s=SECONDS)

    def ended() -> SpecdecError | None:
        try:
            engine.check(patience_s=1.0)
        except SpecdecError as error:
            return error
        return None

    with engine as url:
        settings = Settings(Serve(port=0, drain_timeout_seconds=1.0, **serve), keys)
        described = {"draft": "d", "num_speculative_tokens": 3, "tree": None, "per_request": False}
        state = Front(Upstream(url, "vLLM", ended), settings, PROXIED[behind], described, places)
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


def test_llama_cpp_stands_behind_it_too() -> None:
    with front(behind="llamacpp") as live:
        assert json.loads(live.ask("GET", "/version")[1])["version"] == "b0-unknown"
        assert json.loads(live.ask("GET", "/v1/models")[1])["data"][0]["owned_by"] == "llamacpp"
        passed = json.loads(live.ask("POST", "/v1/completions", BODY)[1])
        assert (passed["path"], passed["body"]) == ("/v1/completions", BODY)
        status, refusal = live.ask("POST", "/v1/completions", BODY | {"cache_salt": "mine"})
        assert (status, "its slots share cached prompts" in refusal) == (400, True)


def test_a_stream_passes_byte_by_byte_with_the_acceptance_of_its_request() -> None:
    with front() as live:
        status, text = live.ask("POST", "/v1/completions", BODY)
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    assert (status, text.splitlines()[-2]) == (200, "data: [DONE]")
    assert "".join(one["choices"][0]["text"] for one in events[:-1]).split() == ["one", "two", "three"] * 3
    own = events[-1]["metrics"]["speculative_decoding"]
    assert (own["num_draft_tokens"], own["num_accepted_draft_tokens"]) == (9, 5)


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


TRAVERSALS = [
    "../../server_info", "..%2f..%2fserver_info", "%2e%2e/%2e%2e/server_info", "%2e%2e%2f%2e%2e%2fserver_info",
    "%252e%252e/%252e%252e/server_info", "%252e%252e%252f%252e%252e%252fserver_info", "..%5c..%5cserver_info",
    "..\\..\\server_info", "a/../../../server_info", "./../../server_info", ".%2e/.%2e/server_info",
    "..;/..;/server_info", "model/../../../server_info", "/../../../server_info", "model%3f/../../../server_info",
    "..%c0%af..%c0%afserver_info", "..%00/../server_info", "model%23/../../../server_info",
]  # fmt: skip


def test_49_17_a_models_name_leads_to_no_other_route_of_the_engine() -> None:
    with front() as live:
        for name in TRAVERSALS:
            status, text = live.ask("GET", f"/v1/models/{name}")
            assert (status, json.loads(text)["error"]["code"]) == (404, "model_not_found"), name
        for path in ("/v1/chat/../../server_info", "/metrics/../server_info", "//server_info", "/server_info"):
            assert live.ask("GET", path)[0] == 404, path
        status, text = live.ask("GET", "/v1/models/model")
        assert (status, json.loads(text)["id"], json.loads(text)["speculative"]["draft"]) == (200, "model", "d")


def test_49_17_what_a_client_adds_for_its_connection_stays_behind() -> None:
    with front("echo") as live:
        connection = live.connect()
        headers = {"content-type": "application/json; charset=utf-8", "x-secret": "1", "x-kept": "2", "te": "trailers"}
        headers["connection"] = "keep-alive, X-Secret"
        connection.request("POST", "/tokenize?a=b", b'{"prompt": "x"}', headers)
        heard = json.loads(connection.getresponse().read())
        connection.close()
    names = {name.lower(): value for name, value in heard["headers"].items()}
    assert (heard["path"], heard["body"]) == ("/tokenize?a=b", {"prompt": "x"})
    assert names["x-kept"] == "2"
    assert names["content-type"] == "application/json"
    assert not {"x-secret", "te", "authorization"} & names.keys()


def test_49_17_keys_share_no_cached_prompts_at_the_engine() -> None:
    with front("echo", keys=("alpha", "beta")) as live:

        def salt(key: str, **fields: Any) -> Any:
            return json.loads(live.ask("POST", "/v1/completions", BODY | fields, key)[1])["body"]["cache_salt"]

        alone = salt("alpha")
        assert alone == salt("alpha") != salt("beta")
        assert salt("alpha", cache_salt="own") == f"{alone}/own" != salt("beta", cache_salt="own")
        assert salt("beta", cache_salt=alone) != alone
        status, text = live.ask("POST", "/v1/completions", BODY | {"cache_salt": 5}, "alpha")
        assert (status, json.loads(text)["error"]["param"]) == (400, "cache_salt")
    with front("echo") as live:
        assert "cache_salt" not in json.loads(live.ask("POST", "/v1/completions", BODY)[1])["body"]


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b'{"model": "model"}', "text/plain", 415),
        (b"a=b", "application/x-www-form-urlencoded", 415),
        (b"{", "application/json", 400),
        (b'{"n": 1, "n": 2}', "application/json", 400),
        (b"[" * 5000, "application/json", 400),
        (b'{"prompt": "' + b"a" * 5_000_000 + b'"}', "application/json", 413),
    ],
    ids=["text", "form", "cut", "a key twice", "deep", "long"],
)
def test_49_17_a_body_that_our_own_server_refuses_is_refused_here(body: bytes, kind: str, status: int) -> None:
    with front("echo") as live:
        connection = live.connect()
        connection.request("POST", "/v1/completions", body, {"content-type": kind})
        assert connection.getresponse().status == status
        connection.close()


def test_49_17_bodies_that_stall_hold_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.5)
    with front(places=2) as live:
        address = live.server.listener.getsockname()[:2]
        stalled = [socket.create_connection(address, timeout=SECONDS) for _ in range(5)]
        for raw in stalled:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 1000\r\n\r\n{"
            )
        assert live.ask("POST", "/v1/completions", BODY)[0] == 200
        for raw in stalled:
            assert b" 408 " in raw.recv(65536).splitlines()[0]
            raw.close()


def test_a_place_is_free_once_its_answer_ends() -> None:
    with front(places=1) as live:
        for _ in range(3):
            assert live.ask("POST", "/v1/completions", BODY)[0] == 200
            until(lambda: not live.server.front.num_open)
        connection = live.connect()
        connection.request("POST", "/v1/completions", json.dumps(ENDLESS), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.read(6) == b"data: "
        assert live.ask("POST", "/v1/completions", BODY)[0] == 429
        answer.close()
        connection.close()
        until(lambda: live.ask("POST", "/v1/completions", BODY)[0] == 200)


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
    assert printed.endswith("--per-request-spec-decode-metrics summary --enforce-eager\n")
    assert run([*words, "--per-request-spec-decode-metrics", "detailed"]) == 0
    assert capsys.readouterr().out.count("--per-request-spec-decode-metrics detailed") == 1
    assert run([*words, "--engine-args", "--per-request-spec-decode-metrics none"]) == 2
    assert "specdec chooses it" in capsys.readouterr().err
    assert run([*words, "-d", "none", "--per-request-spec-decode-metrics", "detailed"]) == 0
    assert "per-request" not in capsys.readouterr().out
    assert run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"].startswith("vllm serve ")


def test_settings_that_neither_has_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "-r", "builtin", "--engine", "vllm"]
    assert run([*words, "--max-stop", "3"]) == 2
    assert "`serve.max_stop` has no effect with --engine vllm" in capsys.readouterr().err
    assert run([*words, "--engine-command", "/nowhere/vllm", "--port", "0"]) == 1
    assert "`/nowhere/vllm` is no program that can be run" in capsys.readouterr().err
