"""Requests that mean harm, over a real socket against one server: each is refused with its reason, none is served."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import live, send, until
from toy_engine import toy_engine

from specdec_cli.text.tokenizer import Tokenizer

KEY = "a-key"
JSON = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
C, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
USER = [{"role": "user", "content": "ab"}]
NESTED = b"[" * 5000 + b"]" * 5000
DEEP_SCHEMA: dict[str, Any] = {"type": "object"}
for _ in range(50):
    DEEP_SCHEMA = {"type": "object", "properties": {"a": DEEP_SCHEMA}}

COSTLY = {"prompt": "abcab", "temperature": 0, "max_tokens": 300}

FIELDS = [
    # Out of range
    (C, {"temperature": -0.1}, "temperature"),
    (C, {"temperature": 1e300}, "temperature"),
    (C, {"top_p": 0}, "top_p"),
    (C, {"top_p": 1.5}, "top_p"),
    (C, {"top_k": -2}, "top_k"),
    (C, {"top_k": 2**40}, "top_k"),
    (C, {"min_p": 2}, "min_p"),
    (C, {"repetition_penalty": 0}, "repetition_penalty"),
    (C, {"presence_penalty": 3}, "presence_penalty"),
    (C, {"frequency_penalty": -3}, "frequency_penalty"),
    (C, {"seed": 2**80}, "seed"),
    (C, {"n": 0}, "n"),
    (C, {"n": 10**9}, "n"),
    (C, {"prompt": ["a"] * 40, "n": 2}, "prompt"),
    (C, {"best_of": 2}, "best_of"),
    (C, {"max_tokens": -1}, "max_tokens"),
    (C, {"max_tokens": 0}, "max_tokens"),
    (C, {"max_tokens": 10**18}, "max_tokens"),
    (C, {"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
    (C, {"logprobs": 10**6}, "logprobs"),
    (C, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (C, {"logit_bias": {"1": 1000}}, "logit_bias.1"),
    (C, {"logit_bias": {"99999": 1}}, "logit_bias"),
    (C, {"logit_bias": {"-1": 1}}, "logit_bias"),
    (C, {"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    (C, {"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
    (C, {"stop": ["a"] * 100}, "stop"),
    (C, {"stop": [""]}, "stop[0]"),
    (C, {"stop": "a" * 5000}, "stop"),
    (C, {"stop_token_ids": [2**30]}, "stop_token_ids[0]"),
    (C, {"cache_salt": "s" * 1000}, "cache_salt"),
    (C, {"speculative": {"num_speculative_tokens": 10**6}}, "speculative.num_speculative_tokens"),
    (C, {"speculative": {"draft": "../../etc/passwd"}}, "speculative.draft"),
    (C, {"speculative.n_max": -1}, "speculative.n_max"),
    # Wrong types
    (C, {"temperature": "0.5"}, "temperature"),
    (C, {"temperature": True}, "temperature"),
    (C, {"max_tokens": 3.5}, "max_tokens"),
    (C, {"stream": "yes"}, "stream"),
    (C, {"prompt": None}, "prompt"),
    (C, {"prompt": {}}, "prompt"),
    (C, {"prompt": []}, "prompt"),
    (C, {"prompt": ""}, "prompt"),
    (C, {"prompt": [1, "a"]}, "prompt"),
    (C, {"prompt": "a" * 600}, "prompt"),
    (C, {"stream_options": {"include_usage": True}}, "stream_options"),
    (C, {"logits_processors": ["os.system"]}, "logits_processors"),
    (C, {"suffix": "b"}, "suffix"),
    # Token ids that do not exist
    (C, {"prompt": [-1]}, "prompt[0]"),
    (C, {"prompt": [12]}, "prompt[0]"),
    (C, {"prompt": [[1], [2**31 - 1]]}, "prompt[1][0]"),
    (C, {"prompt": [10**25]}, "prompt[0]"),
    (DETOKENIZE, {"tokens": [999]}, "tokens[0]"),
    (DETOKENIZE, {"tokens": "1"}, "tokens"),
    # Grammars
    (C, {"structured_outputs": {"regex": "(" * 5000}}, "structured_outputs.regex"),
    (C, {"structured_outputs": {"regex": "a" * 200_000}}, "structured_outputs.regex"),
    (C, {"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
    (
        C,
        COSTLY | {"structured_outputs": {"regex": "((((a{1,999}){1,999}){1,999}){1,999})"}},
        "structured_outputs.regex",
    ),
    (C, COSTLY | {"guided_regex": "(a?){2000}a{2000}"}, "guided_regex"),
    (C, {"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs.grammar"),
    (C, {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    (C, {"structured_outputs": {"json": {"$ref": "http://169.254.169.254/"}}}, "structured_outputs.json"),
    (C, {"structured_outputs": {"json": {"enum": ["x" * 10] * 20_000}}}, "structured_outputs.json"),
    (C, {"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    # Conversations
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": [{"role": "root", "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": USER * 5000}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": USER, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": USER, "chat_template": "{{ 7 * 7 }}"}, "chat_template"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": USER, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    (TOKENIZE, {}, "prompt"),
    (TOKENIZE, {"prompt": "a", "messages": USER}, "prompt"),
]

BODIES = [
    # body, status, field
    (b"", 400, None),
    (b"null", 400, None),
    (b"[]", 400, None),
    (b'{"prompt": "a"', 400, None),
    (b'{"prompt": "a"} {}', 400, None),
    (b'\xef\xbb\xbf{"prompt": "a"}', 400, None),
    (b'{"prompt": "\xff\xfe"}', 400, None),
    (b'{"prompt": "a\x00b"}', 400, None),
    (b'{"prompt": "\\ud800"}', 400, "prompt"),
    (b'{"prompt": "a", "\\ud800": 1}', 400, None),
    (b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
    (b'{"prompt": "a", "temperature": -Infinity}', 400, "temperature"),
    (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
    (b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}", 400, "seed"),
    (b'{"prompt": "a", "n": 1, "n": 2}', 400, "n"),
    (b'{"prompt": ' + NESTED + b"}", 400, "prompt"),
    (NESTED, 400, None),
    (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 400, "a"),
    (json.dumps({"prompt": "a", "structured_outputs": {"json": DEEP_SCHEMA}}).encode(), 400, "structured_outputs"),
    (b'{"prompt": "' + b'\\"' * 200_000, 400, None),
    (b"{" + b",".join(b'"k%d":1' % i for i in range(100_000)) + b',"k99999":1}', 400, "k99999"),
    (b'{"prompt": [' + b"1.5," * 200_000 + b"1]}", 400, "prompt"),
    (b'{"prompt": "a", "stop": [' + b"1," * 200_000 + b"1]}", 400, "stop[0]"),
    (b'{"prompt": "' + b"a" * (4 * 2**20) + b'"}', 413, None),
    (b'{"prompt": "a", "model": "../../etc/passwd"}', 404, "model"),
    (b'{"prompt": "a", "model": ""}', 404, "model"),
]  # fmt: skip

REQUESTS = [
    # bytes, statuses that are right
    (b"GET /version HTTP/1.1\r\n\r\n", (400,)),
    (b"GET /version HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", (400,)),
    (b"GET /version HTTP/1.1\r\nHost: evil.example\r\nAuthorization: Bearer a-key\r\n\r\n", (400,)),
    (b"GET /version HTTP/1.1\r\nHost: localhost:8000@evil\r\nAuthorization: Bearer a-key\r\n\r\n", (400,)),
    (b"GET /version HTTP/9.9\r\nHost: localhost\r\n\r\n", (400, 401, 505)),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100 + b"\r\n\r\n", (400,)),
    (b"GET /ver sion HTTP/1.1\r\nHost: localhost\r\n\r\n", (400,)),
    (b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n", (400,)),
    (b"GET /version HTTP/1.1\r\nHost: localhost\r\n X: folded\r\n\r\n", (400, 401)),
    (b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", (400, 431)),
    (b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 20_000 + b"\r\n", (400, 401, 431)),
    (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", (400, 401, 414)),
    (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}", (400,)),
    (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n{}", (400,)),
    (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n{}", (400, 501)),
    (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
     b"Authorization: Bearer a-key\r\nContent-Type: application/json\r\n\r\nzz\r\n{}", (400,)),
    (b"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\nAuthorization: Bearer a-key\r\n\r\n",
     (401,)),
    (b"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-key\r\nAuthorization: Bearer x\r\n\r\n",
     (401,)),
    (b"CONNECT /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-key\r\n\r\n", (400, 405)),
    (b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-key\r\n\r\n", (400, 404)),
    (b"TRACE /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-key\r\n\r\n", (405,)),
    (b"GET http://evil.example/version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-key\r\n\r\n", (404,)),
]  # fmt: skip

WITHOUT_KEY = [
    "//health", "/health/", "/HEALTH", "/health%2f", "/health%00", "/health/..%2fversion", "/%2e/health", "/./health",
    "/health/../version", "/version/../health", "/health;a", "/health%20", "/%09/health", "/v1/../health",
    "http://localhost/health/", "/health%3fx", "/metrics?x=/health", "/version#/health", "/openapi.json",
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with live(toy_engine(), (KEY,)) as server:
        yield server


@pytest.fixture(autouse=True)
def still_serves(server) -> Iterator[None]:
    """After every one of them the server answers as before, and nothing runs."""
    yield
    until(lambda: not server.bridge.num_open, 2)
    status, body = server.post(C, b'{"prompt": "ab", "max_tokens": 2, "temperature": 0}', JSON)
    assert status == 200, body


def error_of(body: dict[str, Any]) -> dict[str, Any]:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    ("path", "fields", "param"), FIELDS, ids=[f"{param}-{i}" for i, (_, _, param) in enumerate(FIELDS)]
)
def test_a_wrong_field_is_a_400_that_names_it(server, path, fields, param) -> None:
    basis = {"prompt": "ab", "max_tokens": 4} if path == C else {}
    status, body = server.post(path, json.dumps(basis | fields).encode(), JSON)
    assert (status, error_of(body)["param"]) == (400, param), body
    assert len(body["error"]["message"]) < 1000


@pytest.mark.parametrize(("body", "status", "param"), BODIES, ids=[str(i) for i in range(len(BODIES))])
def test_a_body_that_is_no_request_is_refused(server, body, status, param) -> None:
    found, answer = server.post(C, body, JSON)
    assert found == status, answer
    assert error_of(answer)["param"] == param
    assert len(answer["error"]["message"]) < 1000


@pytest.mark.parametrize(("request_bytes", "statuses"), REQUESTS, ids=[str(i) for i in range(len(REQUESTS))])
def test_http_that_is_none_is_refused(server, request_bytes, statuses) -> None:
    status, answer = send(server, request_bytes)
    assert status in statuses, answer[:500]


@pytest.mark.parametrize("path", WITHOUT_KEY)
def test_no_spelling_of_a_path_gets_around_the_key(server, path) -> None:
    status, answer = send(server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert status in (400, 401), answer[:500]


LONG = "ab c" * 950_000  # the 3.8 MB of the report
TOO_LONG = [
    (C, {"prompt": LONG}, "prompt"),
    (C, {"prompt": ["ab", LONG]}, "prompt[1]"),
    (C, {"prompt": LONG, "echo": True}, "prompt"),
    (C, {"prompt": LONG, "truncate_prompt_tokens": 5}, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": 5}, "messages"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/responses", {"input": "ab", "instructions": LONG}, "input"),
    (TOKENIZE, {"prompt": LONG}, "prompt"),
    (TOKENIZE, {"prompt": LONG, "return_token_strs": True}, "prompt"),
    (TOKENIZE, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    (DETOKENIZE, {"tokens": [1] * 1_000_000}, "tokens"),
]


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(
    ("path", "fields", "param"), TOO_LONG, ids=[f"{path}-{i}" for i, (path, _, _) in enumerate(TOO_LONG)]
)
def test_49_16_a_text_far_beyond_the_context_is_refused_before_it_is_tokenized_whole(
    server, monkeypatch: pytest.MonkeyPatch, path, fields, param
) -> None:
    lengths: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    status, body = server.post(path, json.dumps(fields).encode(), JSON)
    assert (status, error_of(body)["param"]) == (400, param), body
    assert sum(lengths) < 50_000
    assert len(body["error"]["message"]) < 200


def test_compressed_bodies_are_refused_unread(server) -> None:
    for encoding in ("gzip", "zstd", "br", "deflate", "identity, gzip"):
        status, body = server.post(C, gzip.compress(b" " * 2**20), JSON | {"content-encoding": encoding})
        assert (status, error_of(body)["code"]) == (415, "content_encoding")
    assert server.post(TOKENIZE, b'{"prompt": "ab"}', JSON | {"content-encoding": "identity"})[0] == 200


def test_another_content_type_is_a_415(server) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", ""):
        assert server.post(C, b'{"prompt": "a"}', JSON | {"content-type": kind})[0] == 415


def test_unknown_fields_are_reported_and_cannot_split_the_header(server) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, "x\r\nset-cookie: a=b": 1, "é" * 5000: 1}).encode()
    status, answer = send(
        server,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-key\r\n"
        b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body),
        body,
    )
    assert status == 200
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert b"x-specdec-ignored: x" in head
    assert b"\r\nset-cookie" not in head
