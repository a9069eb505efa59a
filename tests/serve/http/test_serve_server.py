"""A real server on a real socket: clients that go away, draining, a port in use, a dead engine."""

import gc
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from toy_engine import TableLM, toy_engine
from toy_server import toy_models
from typed import not_none, stand_in

from specdec_cli.errors import RunError, UsageError
from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.http.server import Server, leave_loaded_alone, listen
from specdec_cli.serve.settings import Settings

LONG = {"prompt": "abcab", "temperature": 0, "max_tokens": 480, "ignore_eos": True, "stream": True}


class SlowLM(TableLM):
    """A target whose steps take a while, and that can be told to end the thread."""

    fault: BaseException | None = None

    def score(self, rows):
        time.sleep(0.005)
        if self.fault is not None:
            raise self.fault
        return super().score(rows)


OPENED: list[http.client.HTTPConnection | http.client.HTTPResponse] = []


@contextmanager
def running(target: TableLM | None = None, **serve: Any) -> Iterator[tuple[Server, list[Any]]]:
    settings = Settings(Serve(port=0, **serve))
    models = toy_models(settings, toy_engine(target=target or SlowLM(), k=0))
    server = Server(models, settings, listen("127.0.0.1", 0))
    ended: list[Any] = []

    def serve_forever() -> None:
        try:
            ended.append(server.serve_forever())
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=serve_forever)
    thread.start()
    try:
        until(lambda: server.started)
        yield server, ended
    finally:
        server.should_exit = True
        while OPENED:
            OPENED.pop().close()
        thread.join(20)
        assert not thread.is_alive()


def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def connect(server: Server) -> http.client.HTTPConnection:
    host, port = server.listener.getsockname()[:2]
    opened = http.client.HTTPConnection(host, port, timeout=20)
    OPENED.append(opened)
    return opened


def post(server: Server, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = connect(server)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    return connection


def answer(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    answered = connection.getresponse()
    OPENED.append(answered)
    return answered


def status(server: Server, path: str = "/health") -> int:
    connection = connect(server)
    connection.request("GET", path)
    return answer(connection).status


def test_a_client_that_goes_away_ends_its_request_streaming_or_not() -> None:
    with running() as (server, _):
        bridge = server.models.all[0].bridge
        num_aborted = server.models.all[0].metrics.num_finished
        for place, body in enumerate((LONG, LONG | {"stream": False}), start=1):
            connection = post(server, body)
            response = answer(connection) if body["stream"] else None
            assert response is None or response.read(20)
            until(lambda: bridge.num_open == 1)
            connection.close()
            if response is not None:
                response.close()
            until(lambda place=place: num_aborted["abort"] == place)
        assert bridge.num_open == 0
        assert not bridge.engine.has_work


def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    with running() as (server, ended):
        response = answer(post(server, LONG))
        first = response.read(20)
        not_none(server._loop).call_soon_threadsafe(server.begin_drain)
        until(lambda: server.models.is_draining)
        assert status(server) == 503
        assert answer(post(server, LONG)).status == 503
        whole = first + response.read()
        assert whole.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in whole
        until(lambda: ended)
    assert ended == [0]


def test_a_drain_that_takes_too_long_cuts_off_with_an_error() -> None:
    with running(drain_timeout_seconds=0.05) as (server, ended):
        response = answer(post(server, LONG))
        response.read(20)
        not_none(server._loop).call_soon_threadsafe(server.begin_drain)
        assert b'"code":"shutting_down"' in response.read()
        until(lambda: ended)
    assert ended == [0]


def test_a_dead_engine_ends_the_process_with_an_error() -> None:
    target = SlowLM()
    with running(target) as (server, ended):
        response = answer(post(server, LONG))
        response.read(20)
        target.fault = SystemExit("gone")
        assert b'"code":"engine_dead"' in response.read()
        until(lambda: ended)
    assert isinstance(ended[0], RunError)


def test_silence_is_filled_with_comments() -> None:
    class Sleepy(SlowLM):
        def score(self, rows):
            time.sleep(0.15)
            return super().score(rows)

    with running(Sleepy(), ping_interval_seconds=0.05) as (server, _):
        text = answer(post(server, LONG | {"max_tokens": 3})).read()
    assert text.count(b": ping\n\n") >= 2
    assert text.endswith(b"data: [DONE]\n\n")


def test_a_time_limit_ends_a_stream_with_an_error() -> None:
    with running(request_timeout_seconds=0.3) as (server, _):
        text = answer(post(server, LONG)).read()
        assert b'"code":"timeout"' in text
        until(lambda: server.models.all[0].bridge.num_open == 0)


def test_headers_that_are_too_long_are_refused() -> None:
    with running() as (server, _):
        connection = connect(server)
        connection.putrequest("GET", "/health")
        connection.putheader("x-long", "a" * 200_000)
        connection.endheaders()
        assert answer(connection).status in (400, 431)


def test_a_port_in_use_is_one_sentence() -> None:
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(RunError, match=f"`{port}`"):
        listen("127.0.0.1", port)
    taken.close()
    again = listen("127.0.0.1", port)
    assert isinstance(again, socket.socket)
    again.close()
    with pytest.raises(UsageError):
        listen("no such host", 1)


@pytest.mark.usefixtures("nothing_frozen")
def test_a_full_collection_no_longer_looks_at_what_loading_brought() -> None:
    loaded = SimpleNamespace(settled=threading.Event())
    before = gc.get_freeze_count()
    leave_loaded_alone(stand_in(SimpleNamespace(all=[loaded])))
    assert gc.get_freeze_count() == before
    loaded.settled.set()
    deadline = time.monotonic() + 30
    while gc.get_freeze_count() == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gc.get_freeze_count() > before + 10_000
