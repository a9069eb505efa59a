"""Connections that do not behave, over a real socket: cut off, waited for, or passed over, and nobody else suffers."""

import json
import logging
import re
import resource
import socket
import time
from contextlib import suppress
from functools import partial
from typing import Any, cast

import pytest
from fastapi import FastAPI
from live_server import HeldLM, live, send, until
from toy_engine import toy_engine
from typed import stand_in

from specdec_cli.serve.http import bodies, connection
from specdec_cli.serve.http.server import configured

AUTHORIZED = b"Host: localhost\r\nAuthorization: Bearer a-key\r\n"


@pytest.fixture(scope="module")
def server():
    with live(toy_engine(), ("a-key",)) as server:
        yield server


def answer_of(raw: socket.socket) -> bytes:
    """The first line of an error's or of /health's answer, which is read to its end."""
    found = b""
    while not found.endswith(b"}"):
        more = raw.recv(65536)
        assert more, "the connection was closed"
        found += more
    return found.splitlines()[0]


def streaming(max_tokens: int) -> bytes:
    """A request for a stream."""
    body = json.dumps({"prompt": "abc", "max_tokens": max_tokens, "stream": True, "temperature": 0}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_a_head_that_never_ends_is_cut_off(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    for begin in (b"", b"GET /version HTTP/1.1\r\nX-Slow: "):
        with socket.create_connection(server.listener.getsockname()[:2], timeout=5) as raw:
            raw.sendall(begin)
            started = time.monotonic()
            assert b"408" in raw.recv(65536).splitlines()[0]
            assert raw.recv(65536) == b""
            assert time.monotonic() - started < 4


def test_a_head_that_comes_drop_by_drop_is_cut_off(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    with socket.create_connection(server.listener.getsockname()[:2], timeout=0.02) as raw:
        raw.sendall(b"GET /version HTTP/1.1\r\n")
        answer = b""
        for _ in range(200):
            try:
                raw.sendall(b"X: a\r\n")
                answer += raw.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                break
            if answer:
                break
    assert b" 408 " in answer.splitlines()[0]


def test_a_body_that_never_ends_is_a_408(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.2)
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-key\r\nContent-Type: application/json"
    )
    assert send(server, head + b"\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n{\r\n")[0] == 408
    assert send(server, head + b"\r\nContent-Length: 50\r\n\r\n{")[0] == 408


def test_nobody_reads_on_after_an_early_answer(server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused client that goes on sending loses its connection, and one that has finished keeps it."""
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.2)
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(server.listener.getsockname()[:2], timeout=5) as raw:
        raw.sendall(head)
        assert b" 401 " in answer_of(raw)
        ended = False
        for _ in range(300):
            try:
                raw.sendall(b"1\r\na\r\n")
            except OSError:
                ended = True
                break
            time.sleep(0.01)
        assert ended
    monkeypatch.setattr(connection, "LINGER_SECONDS", 1.0)
    with socket.create_connection(server.listener.getsockname()[:2], timeout=5) as raw:
        raw.sendall(head)
        assert b" 401 " in answer_of(raw)
        raw.sendall(b"1\r\na\r\n0\r\n\r\n")
        time.sleep(1.2)
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in answer_of(raw)


def test_pipelined_requests_are_answered_in_order(server) -> None:
    one = b"GET %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-key\r\n\r\n"
    three = b"".join(one % path for path in (b"/version", b"/nowhere", b"/health"))
    _, found = send(server, three, b"garbage\r\n\r\n", silence=5)
    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"200", b"404", b"200", b"400"]


def test_a_client_that_goes_away_within_its_body_is_no_failure(server, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(server.listener.getsockname()[:2], timeout=5) as raw:
        raw.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-key\r\n")
        raw.sendall(b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{")
        time.sleep(0.05)
    time.sleep(0.1)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_an_offer_to_speak_another_protocol_is_passed_over_and_its_body_read(server, in_one_piece: bool) -> None:
    """As curl and Java's clients do by default: h2c with a body, answered as if nothing had been offered."""
    body = b'{"prompt": "abc"}'
    head = (
        b"POST /tokenize HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    )
    last = b"GET /health HTTP/1.1\r\nConnection: close\r\n" + AUTHORIZED + b"\r\n"
    parts = [head + AUTHORIZED + b"\r\n", body, last]
    _, found = send(server, *([b"".join(parts)] if in_one_piece else parts), silence=5)
    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"200", b"200"]
    assert b'"tokens":' in found


def test_trailers_are_no_headers(server) -> None:
    request = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nAuthorization: Bearer a-key\r\n\r\n"
    )
    assert send(server, request)[0] == 401


@pytest.mark.parametrize("endless", [b"0\r\n" + b"X: a\r\n" * 40_000, b"2;a=" + b"b" * 200_000])
def test_what_is_no_body_has_an_end(server, endless) -> None:
    head = b"POST /tokenize HTTP/1.1\r\n" + AUTHORIZED + b"Content-Type: application/json\r\n"
    with socket.create_connection(server.listener.getsockname()[:2], timeout=5) as raw:
        raw.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        for begin in range(0, connection.MAX_HEAD_BYTES + 5000, 5000):  # what a refusing server has not read breaks it
            raw.sendall(endless[begin : begin + 5000])
            time.sleep(0.01)
        assert b"longer than" in raw.recv(65536)


def test_empty_lines_between_requests_hold_no_connection(server, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_connection(server.listener.getsockname()[:2], timeout=5) as raw:
        raw.sendall(b"\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
        assert b" 200 " in answer_of(raw)
        raw.sendall(b"\r\n")
        assert b" 408 " in answer_of(raw)
        assert raw.recv(100) == b""


def test_what_is_no_http_waits_for_the_answer_before_it() -> None:
    request = json.dumps({"prompt": "abc", "max_tokens": 30, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with live(toy_engine(target=HeldLM(0.005))) as server:
        _, found = send(
            server, head + b"Content-Length: %d\r\n\r\n" % len(request) + request, b"garbage\r\n\r\n", silence=5
        )
    assert b"data: [DONE]" in found.partition(b" 400 ")[0]
    assert found.endswith(b'"code":"invalid_http"}}')


def test_the_first_of_several_requests_learns_that_its_client_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    with live(toy_engine(target=HeldLM(0.02))) as server:
        with socket.create_connection(server.listener.getsockname()[:2], timeout=5) as raw:
            raw.sendall(streaming(max_tokens=400) * 2)
            until(lambda: server.bridge.num_open == 1)
        until(stand_in(lambda: server.models.all[0].metrics.num_finished["abort"]))
        until(lambda: not server.bridge.num_open)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("begin", [b"", b"GET /version HTTP/1.1\r\nX-Slow: ", b"BODY"])
def test_clients_that_stall_keep_nobody_out(caplog: pytest.LogCaptureFixture, monkeypatch, begin: bytes) -> None:
    """The oldest connection without a whole request makes room for the newest; one that is answered stays."""
    logging.getLogger("specdec_cli").propagate = True
    monkeypatch.setattr(connection.Connection, "_next_warning", 0.0)
    if begin == b"BODY":
        begin = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        begin += b"Content-Length: 100\r\n\r\n{"
    with live(toy_engine(target=HeldLM(0.01)), max_connections=8) as few:
        stream = socket.create_connection(few.listener.getsockname()[:2], timeout=5)
        stream.sendall(streaming(200))
        assert b" 200 " in stream.recv(65536).splitlines()[0]
        stalled = [socket.create_connection(few.listener.getsockname()[:2], timeout=5) for _ in range(30)]
        for one in stalled:
            with suppress(OSError):
                one.sendall(begin)
        assert few.text({"prompt": "ab", "max_tokens": 2, "temperature": 0})
        assert b" 503 " in stalled[0].recv(65536).splitlines()[0]
        whole = b""
        while more := stream.recv(65536):
            whole += more
            if b"[DONE]" in whole:
                break
        assert b"[DONE]" in whole
        for one in (stream, *stalled):
            one.close()
    assert sum("more than `8` connections are open" in record.getMessage() for record in caplog.records) == 1


def test_only_answers_in_progress_refuse_a_newcomer() -> None:
    with live(toy_engine(target=HeldLM(0.01)), max_connections=2) as few:
        streams = [socket.create_connection(few.listener.getsockname()[:2], timeout=5) for _ in range(2)]
        for one in streams:
            one.sendall(streaming(300))
            assert b" 200 " in one.recv(65536).splitlines()[0]
        status, answer = send(few, b"")
        assert (status, b"more than `2` connections are open" in answer) == (503, True)
        for one in streams:
            one.close()


def test_a_process_that_may_open_few_files_takes_fewer_connections(monkeypatch, caplog) -> None:
    logging.getLogger("specdec_cli").propagate = True
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    config = configured(FastAPI(), 1, 1024)
    most = cast(partial[Any], config.http).keywords["max_connections"]
    assert 1 <= most < 40
    assert f"at most `{most}` connections, not `1024`" in caplog.text
    assert config.backlog == most


def test_bodies_that_stall_share_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest unfinished bodies are given up for newer ones, and short requests are never refused for them."""
    monkeypatch.setattr(bodies, "BODIES_AT_ONCE", 2)
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 1000000\r\n\r\n" + b'{"prompt": "' + b"a" * 900_000
    with live(toy_engine(), max_body_bytes=2**20) as small:
        held = small.bodies
        raws = []
        for _ in range(6):
            raws.append(socket.create_connection(small.listener.getsockname()[:2], timeout=5))
            raws[-1].sendall(head)
            until(lambda: held.num_bytes >= min(len(raws), 2) * 700_000)
        assert held.num_bytes <= 2 * 2**20
        for one in raws[:3]:
            first, *_, last = one.recv(65536).splitlines()
            assert b" 408 " in first
            assert b"newer requests needed its memory" in last
        assert small.post("/tokenize", {"prompt": "ab"})[0] == 200
        assert small.post("/tokenize", {"prompt": "ab", "user": "a" * 900_000})[0] == 200
        for one in raws:
            one.close()
        until(lambda: held.num_bytes == 0)


def test_finished_bodies_refuse_another_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODIES_AT_ONCE", 1)
    with live(toy_engine(), max_body_bytes=2**20) as small:
        small.bodies.num_bytes = 2**20
        status, answer = small.post("/tokenize", {"prompt": "ab", "user": "a" * 900_000})
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        assert small.post("/tokenize", {"prompt": "ab"})[0] == 200
