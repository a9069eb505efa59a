"""What stands before the routes: keys, hosts, sizes, request ids, and errors in OpenAI's form."""

import json
import logging
import re
from typing import Any

import pytest
from toy_server import toy_client
from typed import stand_in

from specdec_cli.serve.errors import ApiError

ROUTES = [
    ("GET", "/v1/models"), ("GET", "/v1/models/toy"), ("GET", "/version"), ("GET", "/metrics"),
    ("GET", "/tokenizer_info"), ("GET", "/openapi.json"), ("POST", "/v1/completions"), ("POST", "/tokenize"),
    ("POST", "/v1/chat/completions"), ("POST", "/detokenize"), ("GET", "/nowhere"), ("POST", "/health"),
    ("GET", "http://127.0.0.1//health"), ("GET", "/docs/"),
    ("GET", "/health/"), ("GET", "/HEALTH"), ("GET", "/%68ealth/../v1/models"),
    ("GET", "/health/../v1/models"), ("GET", "/health;/v1/models"), ("GET", "/health?x=/v1/models/.."),
]  # fmt: skip
OPEN = {("POST", "/health"), ("GET", "/health?x=/v1/models/..")}  # the route of /health, whatever else is said


def error_of(response) -> dict[str, Any]:
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.json()["error"]


def test_every_route_with_data_wants_the_key() -> None:
    with toy_client(keys=("alpha", "beta")) as client:
        for method, path in ROUTES:
            for headers in ({}, {"authorization": "Bearer alphb"}, {"authorization": "alpha"}, {"authorization": ""}):
                response = client.request(method, path, headers=headers, json={} if method == "POST" else None)
                if (method, path) in OPEN:
                    assert response.status_code in (200, 405)
                else:
                    assert response.status_code == 401, (method, path, headers)
                    assert error_of(response)["code"] == "invalid_api_key"
                    assert response.headers["www-authenticate"]
        assert client.get("/health").json() == {"status": "ok"}
        for key in ("alpha", "beta"):
            assert client.get("/version", headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert client.get("/version", auth=("anybody", "beta")).status_code == 200
        assert client.get("/version", headers={"authorization": "Basic !!!"}).status_code == 401


@pytest.mark.parametrize("path", ["/", "/docs", "/health"])
def test_pages_and_health_need_no_key(path: str) -> None:
    with toy_client(keys=("alpha",)) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert client.get(path, headers=headers).status_code == 200
            assert client.head(path, headers=headers).status_code == 200


def test_the_reference_works_offline() -> None:
    with toy_client() as client:
        answer = client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "script-src 'none'" in answer.headers["content-security-policy"]
    assert "<script" not in answer.text
    assert re.findall(r'(?:src|href)="(?!#|openapi\.json|\./)', answer.text) == []
    for path in ("/v1/chat/completions", "/v1/responses", "/tokenize", "/health"):
        assert f"{path}</code>" in answer.text
    assert "<code>temperature</code>" in answer.text
    targets = set(re.findall(r'href="#([^"]+)"', answer.text))
    assert targets <= set(re.findall(r'id="([^"]+)"', answer.text))


def test_polls_are_not_logged_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    for logs_polls in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, "specdec_cli"), toy_client(log_polls=logs_polls) as client:
            for path in ("/health", "/metrics", "/version"):
                client.get(path)
            client.head("/health")
        logged = [record.getMessage() for record in caplog.records if record.name.endswith("access")]
        assert ("GET /health" in logged, "GET /metrics" in logged) == (logs_polls, logs_polls)
        assert "GET /version" in logged


def test_a_key_in_latin_letters_is_only_wrong() -> None:
    with toy_client(keys=("alpha",)) as client:
        assert client.get("/version", headers={b"authorization": b"Bearer alph\xe4"}).status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil", "", "[::1", "a b"])
def test_a_strange_host_is_refused_on_loopback(host: str) -> None:
    with toy_client() as client:
        response = client.get("/version", headers={"host": host})
    assert response.status_code == 400
    assert error_of(response)["code"] == "unknown_host"


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "my.name"])
def test_the_servers_own_names_are_taken(host: str) -> None:
    with toy_client(allowed_hosts=("my.name",)) as client:
        assert client.get("/version", headers={"host": host}).status_code == 200


def test_beyond_loopback_any_host_unless_named() -> None:
    with toy_client(host="0.0.0.0") as client:
        assert client.get("/version", headers={"host": "what.ever"}).status_code == 200
    with toy_client(host="0.0.0.0", allowed_hosts=("my.name",)) as client:
        assert client.get("/version", headers={"host": "what.ever"}).status_code == 400


def test_request_ids_are_echoed_if_sane_else_made() -> None:
    with toy_client(keys=("k",)) as client:
        for path in ("/health", "/nowhere"):
            assert client.get(path, headers={"x-request-id": "abc-1.2:3"}).headers["x-request-id"] == "abc-1.2:3"
        made = client.get("/health", headers={"x-request-id": "a b<script>"}).headers["x-request-id"]
        assert made != client.get("/health").headers["x-request-id"]
        assert made.isalnum()


def test_long_bodies_are_refused_announced_or_not() -> None:
    with toy_client(max_body_bytes=2048) as client:
        body = json.dumps({"prompt": "a" * 4096}).encode()
        announced = client.post("/tokenize", content=body, headers={"content-type": "application/json"})
        pieces = (body[i : i + 100] for i in range(0, len(body), 100))
        streamed = client.post("/tokenize", content=pieces, headers={"content-type": "application/json"})
    assert [announced.status_code, streamed.status_code] == [413, 413]
    assert [error_of(announced)["code"], error_of(streamed)["code"]] == ["body_too_large"] * 2


def test_errors_of_the_framework_have_openais_form() -> None:
    with toy_client() as client:
        assert "`/nowhere`" in error_of(client.get("/nowhere"))["message"]
        wrong = client.get("/v1/completions")
        assert wrong.status_code == 405
        assert wrong.headers["allow"] == "POST"
        assert error_of(wrong)["type"] == "invalid_request_error"
        form = client.post("/tokenize", content=b"{}", headers={"content-type": "text/plain"})
        assert (form.status_code, error_of(form)["code"]) == (415, "content_type")
        assert error_of(client.get("/v1/models/none"))["code"] == "model_not_found"


def test_a_bug_is_a_500_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    with toy_client() as client:
        client.models.all[0].metrics.render = stand_in(lambda _: 1 / 0)
        response = client.get("/metrics", headers={"x-request-id": "bug-1"})
    assert response.status_code == 500
    assert error_of(response)["message"] == "the server failed: `ZeroDivisionError`"
    assert response.headers["x-request-id"] == "bug-1"
    assert any(record.exc_info and vars(record)["request_id"] == "bug-1" for record in caplog.records)


def test_cors_is_off_unless_named() -> None:
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with toy_client(keys=("k",)) as client:
        assert client.options("/v1/completions", headers=preflight).status_code == 401
    with toy_client(keys=("k",), cors_origins=("https://a.example",)) as client:
        answer = client.options("/v1/completions", headers=preflight)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = client.options("/v1/completions", headers=preflight | {"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_an_api_error_knows_its_type() -> None:
    assert ApiError(429, "x").type == "rate_limit_error"
