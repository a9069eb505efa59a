"""Connections that do not behave, over a real socket: cut off, waited for, or passed over, and nobody else suffers."""

import json
import logging
import re
import resource
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from fastapi import FastAPI
from live_server import HeldLM, live, send, until
from toy_engine import toy_engine
from typed import stand_in

from specdec_cli.serve.http import bodies, guard
from specdec_cli.serve.http.server import LimitedServer

# Python's own opener keeps the proxies that it saw first, in whichever test that was.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
AUTHORIZED = b"Host: localhost\r\nAuthorization: Bearer a-key\r\n"


@pytest.fixture(scope="module")
def server():
    with live(toy_engine(), ("a-key",)) as server:
        yield server


def streaming(max_tokens: int) -> bytes:
    """A request for a stream."""
    body = json.dumps({"prompt": "abc", "max_tokens": max_tokens, "stream": True, "temperature": 0}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_a_body_that_never_ends_is_a_408(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.2)
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-key\r\nContent-Type: application/json"
    )
    assert send(server, head + b"\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n{\r\n")[0] == 408
    assert send(server, head + b"\r\nContent-Length: 50\r\n\r\n{")[0] == 408


def answer_to(server, path: str, body, **headers: str) -> tuple[int, dict[str, Any]]:
    """What urllib shows of an answer; it closes its connections, and sends all of a body before it reads."""
    request = urllib.request.Request(f"{server.url}{path}", body, headers, method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        DIRECT.open(request, timeout=20)
    with refused.value as answer:
        return answer.code, json.load(answer)["error"]


@pytest.mark.parametrize("num_bytes", [4 * 2**20 + 1, 30 * 2**20])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_client_that_sends_all_of_a_body_sees_that_it_is_too_long(server, num_bytes: int, in_chunks: bool) -> None:
    body = (b"a" * 2**16 for _ in range(num_bytes // 2**16 + 1)) if in_chunks else b"a" * num_bytes
    status, error = answer_to(
        server, "/v1/completions", body, Authorization="Bearer a-key", **{"Content-Type": "application/json"}
    )
    assert (status, error["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/completions", {}, 401),
        ("/nowhere", {"Authorization": "Bearer a-key"}, 404),
        ("/health", {"Authorization": "Bearer a-key"}, 405),
        ("/tokenize", {"Authorization": "Bearer a-key", "Content-Type": "text/plain"}, 415),
    ],
)
def test_every_early_answer_is_seen_behind_a_long_body(server, path: str, headers: dict[str, str], status: int) -> None:
    assert answer_to(server, path, b"a" * (20 * 2**20), **headers)[0] == status


def test_no_more_than_the_limit_of_an_unwanted_body_is_read(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LINGER_BYTES", 2**20)
    body = (b"a" * 2**16 for _ in range(2**14))
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        DIRECT.open(urllib.request.Request(f"{server.url}/v1/completions", body, method="POST"), timeout=20)
    assert next(body, None) is not None, "a gigabyte is not sent to the end"


def test_pipelined_requests_are_answered_in_order(server) -> None:
    one = b"GET %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-key\r\n\r\n"
    three = b"".join(one % path for path in (b"/version", b"/nowhere", b"/health"))
    _, found = send(server, three, b"garbage\r\n\r\n", silence=5)
    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"200", b"404", b"200", b"400"]


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"Host: localhost\r\nContent-Length: -1\r\n", "bad Content-Length"),
        (b"Host: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n", "conflicting Content-Length headers"),
        (b"Content-Length: 2\r\n", "Missing mandatory Host: header"),
        (b"Host: localhost\r\nTransfer-Encoding: chunked\r\n", "illegal chunk header"),
    ],
)
def test_49_what_is_no_http_is_an_error_like_others(server, head: bytes, reason: str) -> None:
    status, found = send(server, b"POST /tokenize HTTP/1.1\r\n" + head + b"\r\n-5\r\nhello\r\n0\r\n\r\n")
    error = json.loads(found.partition(b"\r\n\r\n")[2])["error"]
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_http")
    assert error["message"].startswith(f"the request is no valid HTTP: {reason}")


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
        for begin in range(0, 70_000, 5000):  # what a refusing server has not read breaks the connection
            raw.sendall(endless[begin : begin + 5000])
            time.sleep(0.01)
        assert b" 400 " in raw.recv(65536).splitlines()[0]


def test_what_is_no_http_waits_for_the_answer_before_it() -> None:
    request = json.dumps({"prompt": "abc", "max_tokens": 30, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with live(toy_engine(target=HeldLM(0.005))) as server:
        _, found = send(
            server, head + b"Content-Length: %d\r\n\r\n" % len(request) + request, b"garbage\r\n\r\n", silence=5
        )
    assert b"data: [DONE]" in found.partition(b" 400 ")[0]
    assert b" 400 " in found.partition(b"[DONE]")[2]


def test_the_first_of_several_requests_learns_that_its_client_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    with live(toy_engine(target=HeldLM(0.02))) as server:
        with socket.create_connection(server.listener.getsockname()[:2], timeout=5) as raw:
            raw.sendall(streaming(max_tokens=400) * 2)
            until(lambda: server.bridge.num_open == 1)
        until(stand_in(lambda: server.models.all[0].metrics.num_finished["abort"]))
        until(lambda: not server.bridge.num_open)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("begin", [b"", b"GET /version HTTP/1.1\r\nX-Slow: "])
def test_49_19_beyond_the_limit_of_connections_requests_get_a_503_and_answers_go_on(monkeypatch, caplog, begin) -> None:
    # A slow machine warns once, too.
    monkeypatch.setattr("specdec_cli.serve.http.server._TICKS_BETWEEN_WARNINGS", 10**6)
    caplog.set_level(logging.WARNING, "specdec_cli")
    with live(toy_engine(target=HeldLM(0.01)), max_connections=4) as few:
        stream = socket.create_connection(few.listener.getsockname()[:2], timeout=5)
        stream.sendall(streaming(200))
        assert b" 200 " in stream.recv(65536).splitlines()[0]
        stalled = [socket.create_connection(few.listener.getsockname()[:2], timeout=5) for _ in range(3)]
        for one in stalled:
            one.sendall(begin)
        until(lambda: "`4` connections are open" in caplog.text)
        assert send(few, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 503
        whole = b""
        while b"[DONE]" not in whole:
            whole += stream.recv(65536)
        for one in (stream, *stalled):
            one.close()
        until(lambda: send(few, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 200)
    warnings = [record for record in caplog.records if "`4` connections are open" in record.getMessage()]
    assert len({(record.created, record.thread) for record in warnings}) == 1, "one, however many handlers keep it"


def test_49_19_a_process_that_may_open_few_files_takes_fewer_connections(monkeypatch, caplog) -> None:
    caplog.set_level(logging.WARNING, "specdec_cli")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    server = LimitedServer(FastAPI(), 1, 1024)
    most = server.max_connections
    assert 1 <= most < 40
    assert f"at most `{most}` connections, not `1024`" in caplog.text
    assert (server.config.backlog, server.config.limit_concurrency) == (most, most + 1)


def test_49_19_bodies_that_stall_share_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_49_16_finished_bodies_refuse_another_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODIES_AT_ONCE", 1)
    with live(toy_engine(), max_body_bytes=2**20) as small:
        small.bodies.num_bytes = 2**20
        status, answer = small.post("/tokenize", {"prompt": "ab", "user": "a" * 900_000})
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        assert small.post("/tokenize", {"prompt": "ab"})[0] == 200
