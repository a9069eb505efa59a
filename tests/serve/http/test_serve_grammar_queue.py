"""Grammars that cost too much, over a real socket: they cost their own client an error, and nobody else an answer."""

import http.client
import json
import threading
from typing import Any

import pytest
from hostile_grammars import PATTERNS, intersection
from live_server import live, until
from toy_engine import toy_engine

from specdec_cli.serve.http import grammar_queue
from specdec_cli.serve.http.request_handler import RequestHandler
from specdec_cli.serve.http.server import Server
from specdec_cli.serve.http.watched_pool import WatchedPool

C = "/v1/completions"
PLAIN = {"prompt": "ab", "max_tokens": 4, "temperature": 0}
HOSTILE: list[dict[str, Any]] = [
    {"structured_outputs": {"grammar": intersection(24)}},
    {"guided_grammar": intersection(60)},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": json.loads(PATTERNS)}}},
    {"structured_outputs": {"json": json.loads(PATTERNS)}},
]


def handler(server: Server) -> RequestHandler:
    return server._handler


def test_49_15_hostile_grammars_hold_up_no_other_client() -> None:
    with live(toy_engine(), max_grammar_seconds=0.3) as server:
        expected = server.text(PLAIN)
        answers: list[tuple[int, dict[str, Any]]] = []
        clients = [
            threading.Thread(target=lambda fields=fields: answers.append(server.post(C, PLAIN | fields)))
            for fields in HOSTILE
        ]
        for client in clients:
            client.start()
        until(lambda: handler(server).grammars.pool.is_busy)
        assert server.text(PLAIN) == expected
        for client in clients:
            client.join()
        assert [status for status, _ in answers] == [400] * 4, answers
        assert all("processor time" in answer["error"]["message"] for _, answer in answers)
        assert {answer["error"]["param"] for _, answer in answers} == {
            "structured_outputs.grammar",
            "guided_grammar",
            "response_format.json_schema.schema",
            "structured_outputs.json",
        }
        until(lambda: not handler(server).is_busy)
        assert set(server.text(PLAIN | {"guided_regex": "[ab]+"})) <= {"a", "b"}


def test_49_15_a_client_that_leaves_ends_its_compilation() -> None:
    with live(toy_engine(), max_grammar_seconds=600) as server:
        server.text(PLAIN | {"guided_regex": "[ab]+"})
        connection = server.connect()
        connection.request("POST", C, json.dumps(PLAIN | HOSTILE[3]), {"content-type": "application/json"})
        until(lambda: handler(server).grammars.pool.is_busy)
        connection.close()
        until(lambda: not handler(server).is_busy)
        assert server.models.all[0].num_preparing == 0


def test_49_15_the_queue_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "_MAX_OPEN", 0)
    with live(toy_engine()) as server:
        status, answer = server.post(C, PLAIN | {"guided_regex": "[ab]+"})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (429, "queue_full", "guided_regex")
        assert server.post(C, PLAIN)[0] == 200


@pytest.mark.parametrize("pool", ["pool", "grammars"])
def test_49_15_a_stuck_pool_shows_in_health_and_does_not_hold_up_the_end(
    pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("specdec_cli.serve.http.server.os._exit", ended.append)
    release = threading.Event()
    with live(toy_engine(), hang_timeout_seconds=0.05) as server:
        threads = handler(server).pool if pool == "pool" else handler(server).grammars.pool
        work = [threads.submit(release.wait) for _ in range(threads._num_threads)]
        until(lambda: health(server) == (503, "stuck"))
        server.should_exit = True
        until(lambda: ended == [0])
        release.set()
        for one in work:
            one.result()


def health(server: Any) -> tuple[int, str]:
    connection: http.client.HTTPConnection = server.connect()
    connection.request("GET", "/health")
    response = connection.getresponse()
    status, body = response.status, json.loads(response.read())
    connection.close()
    return status, body["status"]


def test_49_15_a_pool_with_a_free_thread_is_not_stuck() -> None:
    pool, release = WatchedPool(2, "test"), threading.Event()
    first = pool.submit(release.wait)
    until(lambda: pool.is_busy)
    assert pool.stuck_seconds == 0.0
    second = pool.submit(release.wait)
    until(lambda: pool.stuck_seconds > 0.0)
    release.set()
    assert first.result()
    assert second.result()
    until(lambda: not pool.is_busy)
    pool.shutdown()
