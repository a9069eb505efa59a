"""`audit --endpoint` and `audit --tools`: answers with and without the draft, near ties told apart from damage."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from endpoint_runs import without_environment
from schemas import assert_fits

from specdec_cli.cli import audit_requests
from specdec_cli.cli.main import run
from specdec_cli.measure.documents.request_audit import RequestAuditDocument
from specdec_cli.report.request_audit import verdict_words

Answer = Callable[[dict[str, Any], bool], dict[str, Any] | int]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_environment(monkeypatch)


def choice(
    tokens: str, other: tuple[int, str, float] = (0, "?", -9.0), drafted: int = 8, **message: Any
) -> dict[str, Any]:
    """A chat's answer of one-letter tokens, each of log-probability -0.5; `other` is likely at a place, too."""
    content = [
        {"token": letter, "logprob": -0.5, "top_logprobs": [{"token": letter, "logprob": -0.5}]} for letter in tokens
    ]
    place, token, logprob = other
    content[place]["top_logprobs"].append({"token": token, "logprob": logprob})  # type: ignore[attr-defined]
    figures = {"num_draft_tokens": drafted, "num_accepted_draft_tokens": drafted // 2, "num_spec_steps": drafted}
    return {
        "choices": [
            {"message": {"content": tokens} | message, "finish_reason": "stop", "logprobs": {"content": content}}
        ],
        "metrics": {"speculative_decoding": figures},
    }


@contextmanager
def server(answer: Answer, owner: str = "specdec") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server whose answers depend on the request, and on whether it asks for no draft."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def give(self, status: int, document: dict[str, Any]) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            models = {"data": [{"id": "m", "owned_by": owner}]}
            self.give(200 if self.path == "/v1/models" else 404, models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            bodies.append(body)
            given = answer(body, body.get("speculative") == {"enabled": False})
            if isinstance(given, int):
                self.give(given, {"error": {"message": "`logprobs` is not known"}})
            else:
                self.give(200, given)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", bodies
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def requests(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def said(name: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "messages": [{"role": "user", "content": name}], **fields}


def call(arguments: str) -> dict[str, Any]:
    return {"content": None, "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}


def mixed(body: dict[str, Any], is_plain: bool) -> dict[str, Any]:
    """One request of each outcome."""
    drafted = 0 if is_plain else 8
    name = body["messages"][0]["content"]
    if name == "tie":
        return choice("abc", (1, "x", -0.52), drafted) if is_plain else choice("axc", drafted=drafted)
    if name == "damage":
        return choice('{"a":1}', (3, "]", -7.0), drafted) if is_plain else choice('{"a]', drafted=drafted)
    if name == "call":
        return choice("w", drafted=drafted, **call('{"city": "Rome"}' if is_plain else '{"city": "Rome"'))
    return choice("same", drafted=drafted)


def document(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    assert_fits(found, RequestAuditDocument)
    return found


def test_near_ties_are_told_apart_from_damage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    file = requests(
        tmp_path / "r.jsonl",
        said("same"),
        said("tie"),
        said("damage", response_format={"type": "json_object"}),
        {"custom_id": "7", "url": "/v1/chat/completions", "body": said("call", tools=tools)},
    )
    with server(mixed) as (url, bodies):
        assert run(["audit", "--endpoint", url, "--tools", file, "--json", "--quiet"]) == 3
        found = document(capsys.readouterr().out)
        assert run(["audit", "--endpoint", url, "--tools", file]) == 3
    assert {body["temperature"] for body in bodies} == {0}
    assert [("speculative" in body) for body in bodies[:8]] == [True, False] * 4
    classes = [(each["id"], each["kind"], each["class"], each["position"]) for each in found["differences"]]
    assert classes == [
        ("tie", "text", "near-tie", 1),
        ("damage", "JSON", "damage", 3),
        ("7", "tool calls", "damage", 1),
    ]
    assert found["differences"][0]["gap_nats"] == pytest.approx(0.02)
    kinds = found["by_kind"]
    assert (kinds["text"]["requests"], kinds["text"]["equal"], kinds["text"]["near_ties"]) == (2, 1, 1)
    for kind in ("JSON", "tool calls"):
        assert (kinds[kind]["checked"], kinds[kind]["valid_without"], kinds[kind]["valid_with_draft"]) == (1, 1, 0)
    assert (found["verdict"], found["num_draft_tokens"]) == ("fail", 32)
    shown = capsys.readouterr().out
    assert "FAIL: 2 of 4 answers differ with the draft, and not at a near tie" in shown
    assert "request 2 (tie), text: near-tie at token 2, 0.0200 nats apart" in shown
    assert """without: 'weather({"city": "Rome"})'""" in shown


def test_ctrl_c_reports_what_was_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def answer(body: dict[str, Any], is_plain: bool) -> dict[str, Any]:
        if is_plain and body["messages"][0]["content"] == "last":
            os.kill(os.getpid(), signal.SIGINT)
        return mixed(body, is_plain)

    file = requests(tmp_path / "r.jsonl", said("same"), said("damage"), said("last"), said("never"))
    with server(answer) as (url, bodies):
        assert run(["audit", "--endpoint", url, "--tools", file, "--json"]) == 130
    found, err = capsys.readouterr()
    body = document(found)
    assert (len(bodies), body["num_requests"], body["interrupted"], body["verdict"]) == (6, 4, True, "fail")
    assert "interrupted: 3 of 4 requests were compared" in err
    body |= {"verdict": "inconclusive", "differences": []}
    assert verdict_words(body) == "INTERRUPTED: 3 of 4 answers were compared, 3 of them equal"


def test_near_ties_alone_pass(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = requests(tmp_path / "r.jsonl", said("same"), said("tie"))
    with server(mixed) as (url, _):
        assert run(["audit", "--endpoint", url, "--tools", file]) == 0
    shown = capsys.readouterr().out
    assert "PASS: 1 of 2 answers are equal with and without the draft; near ties: 1" in shown


def test_text_of_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    with server(lambda body, is_plain: choice("same", drafted=0)) as (url, bodies):
        assert run(["audit", "--endpoint", url, "--chat", "--num-prompts", "2", "-n", "7"]) == 0
    assert [body["max_tokens"] for body in bodies] == [7] * 4
    assert "note: nothing was drafted, so equality says little" in capsys.readouterr().out


def test_a_server_that_cannot_switch_its_draft_off_needs_another(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = requests(tmp_path / "r.jsonl", said("same"))
    with server(mixed, owner="vllm") as (url, bodies), server(lambda *_: choice("same", drafted=0)) as (plain, others):
        assert run(["audit", "--endpoint", url, "--tools", file]) == 1
        assert "name it: --plain-endpoint URL" in capsys.readouterr().err
        assert run(["audit", "--endpoint", url, "--plain-endpoint", plain, "--tools", file]) == 0
        assert (len(bodies), len(others)) == (1, 1)
        assert run(["audit", "--endpoint", plain, "--plain-endpoint", url, "--tools", file]) == 1
        assert "drafted 8 tokens for answers without a draft" in capsys.readouterr().err


def test_without_log_probabilities_a_difference_is_unknown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def answer(body: dict[str, Any], is_plain: bool) -> dict[str, Any] | int:
        if "logprobs" in body:
            return 400
        found = mixed(body, is_plain)
        found["choices"][0]["logprobs"] = None
        return found

    with server(answer) as (url, bodies):
        assert run(["audit", "--endpoint", url, "--tools", requests(tmp_path / "r", said("tie"), said("same"))]) == 3
    assert ["logprobs" in body for body in bodies] == [True] + [False] * 4
    out = capsys.readouterr().out
    assert "request 1 (tie), text: unknown" in out
    assert "whether a difference is a near tie is unknown" in out


def test_our_own_server_runs_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It gets what the command line sets and nothing else, and is asked as any server."""
    seen: list[str] = []

    @contextmanager
    def started(name: str, words: list[str], **_: Any) -> Iterator[str]:
        seen.append(Path(words[words.index("--recipe") + 1]).read_text() if "--recipe" in words else "")
        with server(mixed) as (url, _bodies):
            yield url

    monkeypatch.setattr(audit_requests, "EngineProcess", started)
    file = requests(tmp_path / "r.jsonl", said("same"))
    assert run(["audit", "--tools", file, "-d", "ngram:max=3", "-k", "2"]) == 0
    assert "num_speculative_tokens: 2" in seen[0]
    assert "method: ngram" in seen[0]
    assert "api_key_env" not in seen[0]
    assert run(["audit", "--tools", file]) == 0
    assert seen[1] == ""  # no recipe, since an empty one is refused


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--plain-endpoint", "http://x"], "`--plain-endpoint` has no effect without --endpoint"),
        (["--endpoint", "http://x", "--k-values", "2"], "`--k-values` has no effect with --endpoint"),
        (["--tools", "FILE", "--batch-sizes", "2"], "`--batch-sizes` has no effect with --tools"),
        (["--tools", "FILE", "--chat"], "`--chat` has no effect with --tools"),
        (["--tools", "FILE", "--num-prompts", "3"], "`--num-prompts` has no effect with `--tools`"),
        (["--tools", "FILE", "--junit", "x.xml"], "answers of a server are audited into JSON alone"),
        (["--tools", "FILE", "--temperature", "1"], "answers are compared at temperature 0"),
        (["--tools", "FILE", "-d", "none"], "there is no draft to audit"),
        (["--tools", "WARM"], "has `temperature: 0.7`"),
        (["--tools", "EMPTY"], "holds no request"),
        (["--tools", "TWICE"], "has the key `n` twice"),
        (["--tools", "OTHER"], "it has neither `messages` nor `prompt`"),
    ],
)
def test_what_means_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], why: str
) -> None:
    files = {
        "FILE": requests(tmp_path / "f", said("same")),
        "WARM": requests(tmp_path / "w", said("same", temperature=0.7)),
        "EMPTY": requests(tmp_path / "e"),
        "OTHER": requests(tmp_path / "o", {"input": "x"}),
        "TWICE": str(tmp_path / "t"),
    }
    (tmp_path / "t").write_text('{"prompt": "a", "n": 1, "n": 2}')
    assert run(["audit", *(files.get(word, word) for word in words)]) == 2
    assert why in capsys.readouterr().err
