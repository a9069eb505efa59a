"""A small OpenAI-like server in a thread: it streams words, counts them, and can misbehave in many ways."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VLLM = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="fake"}} {drafts}
vllm:spec_decode_num_drafts_total{{engine="0",model_name="other"}} 9999
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{{engine="0",model_name="fake"}} 1.7e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="fake"}} {drafted}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="fake"}} {accepted}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="fake",position="0"}} {drafts}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="fake",position="1"}} {second}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="fake"}} {tokens}
# TYPE vllm:request_generation_tokens histogram
vllm:request_generation_tokens_bucket{{le="+Inf"}} 3
vllm:request_generation_tokens_sum 3
vllm:request_generation_tokens_count 3
"""
"""What each request adds: 4 drafts of 2 tokens, 4 and 3 of them accepted."""


@dataclass
class Fake:
    """How it behaves, and what it was asked.

    Args:
        words: chunks of an answer.
        tokens_per_word: what its usage says of each.
        usage: whether it sends usage at all.
        metrics: the template of its /metrics; None has none.
        owner: whose models it lists.
        fault: which way it misbehaves: a status, or a word that `do_POST` knows.
        faulty_from: the first request (the warm-up is 0) that it happens to.
        key: the one it wants.
        others: tokens that somebody else's requests get in the meantime, for each of ours.
        refusal: its words when it refuses, or None for some of its own.
        pause_s: before an answer.
        script: events to stream in place of words, or what makes them of a request: strings as they are, numbers wait.
        most_per_connection: requests that a connection answers; the next one finds it closed.
    """

    words: int = 5
    tokens_per_word: int = 3
    usage: bool = True
    metrics: str | None = VLLM
    owner: str = "somebody"
    fault: int | str | None = None
    faulty_from: int = 0
    key: str | None = None
    others: int = 0
    refusal: str | None = None
    pause_s: float = 0.0
    most_per_connection: int | None = None
    script: list[Any] | Callable[[dict[str, Any]], list[Any]] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most_at_a_time: int = 0
    at_work: int = 0
    url: str = ""
    lock: Any = field(default_factory=threading.Lock)

    def page(self) -> str:
        num = len(self.requests)
        tokens = num * (self.words * self.tokens_per_word + self.others)
        return (self.metrics or "").format(
            drafts=4 * num, drafted=8 * num, accepted=7 * num, second=3 * num, tokens=tokens
        )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    fake: Fake

    def handle_error(self, *_: Any) -> None:
        """A client that went away is not the server's fault."""


class Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_version, sys_version = "fake", ""
    num_answered = 0

    @property
    def fake(self) -> Fake:
        return self.server.fake

    def log_message(self, *_: Any) -> None:
        pass

    def plain(self, status: int, text: str, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text.encode())))
        if status == 307:
            self.send_header("location", "http://elsewhere/")
        self.end_headers()
        self.wfile.write(text.encode())

    def allowed(self) -> bool:
        given = self.headers.get("authorization")
        if self.fake.key is None or given == f"Bearer {self.fake.key}":
            return True
        self.plain(401, json.dumps({"error": {"message": f"wrong key {given}"}}))
        return False

    def do_GET(self) -> None:
        if self.path == "/v1/models" and self.allowed():
            if self.fake.fault == "html":
                self.plain(200, "<html>hello</html>", "text/html")
            elif self.fake.fault == "error list":
                self.plain(200, '{"error": {"message": "no database"}}')
            else:
                self.plain(200, json.dumps({"data": [{"id": "fake", "owned_by": self.fake.owner}, {"id": "second"}]}))
        elif self.path == "/version":
            self.plain(200, '{"version": "1.2.3"}')
        elif self.path == "/metrics" and self.fake.metrics is not None:
            self.plain(200, self.fake.page(), "text/plain")
        elif self.path != "/v1/models":
            self.plain(404, '{"detail": "Not Found"}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.num_answered == self.fake.most_per_connection:
            self.close_connection = True
            return
        self.num_answered += 1
        if not self.allowed():
            return
        with self.fake.lock:
            place = len(self.fake.requests)
            self.fake.requests.append(body)
            self.fake.paths.append(self.path)
            self.fake.at_work += 1
            self.fake.most_at_a_time = max(self.fake.most_at_a_time, self.fake.at_work)
        time.sleep(self.fake.pause_s)
        fault = self.fake.fault if place >= self.fake.faulty_from else None
        if isinstance(fault, int):
            said = self.fake.refusal or f"I say {fault} \x1b[31m to key {self.fake.key}"
            words = {"error": {"message": said}}
            self.plain(fault, json.dumps(words))
        elif fault == "error body":
            self.plain(200, '{"error": {"message": "no such model"}}')
        elif fault == "no stream":
            self.plain(200, '{"choices": []}')
        elif fault == "leaves":
            self.server.shutdown()
            self.server.server_close()
            self.close_connection = True
        else:
            self.stream(str(fault), body)
        with self.fake.lock:
            self.fake.at_work -= 1

    def event(self, data: Any) -> None:
        text = _event_bytes(data)
        self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
        self.wfile.flush()

    def play(self, events: list[Any]) -> None:
        """Stream a script; a string that begins with a colon or names a field is written as it stands.

        A list of events is written in one piece.
        """
        for event in events:
            if isinstance(event, int | float):
                time.sleep(event)
            elif isinstance(event, list):
                whole = b"".join(_event_bytes(each) for each in event)
                self.wfile.write(f"{len(whole):x}\r\n".encode() + whole + b"\r\n")
            elif isinstance(event, str) and event.startswith((":", "event:", "data:")):
                text = f"{event}\n\n".encode()
                self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
            else:
                self.event(event)
        self.wfile.write(b"0\r\n\r\n")

    def stream(self, fault: str, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        if self.fake.script is not None:
            self.play(self.fake.script(body) if callable(self.fake.script) else self.fake.script)
            return
        is_chat = "chat" in self.path
        if is_chat:
            self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for place in range(self.fake.words):
            if place == 2 and fault == "dies":
                self.close_connection = True
                self.connection.close()
                return
            if place == 2 and fault in ("error", "garbage", "short"):
                self.event({"error": {"message": "the engine died"}} if fault == "error" else "{nonsense")
                break
            last = "length" if place == self.fake.words - 1 else None
            text = {"delta": {"content": " word"}} if is_chat else {"text": " word"}
            self.event({"choices": [text | {"finish_reason": last}]})
        if self.fake.usage:
            tokens = self.fake.words * self.fake.tokens_per_word
            self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})
        if fault != "cut":
            self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")


def _event_bytes(data: Any) -> bytes:
    """A server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """The server at `fake.url`, until the block ends."""
    server = _Server(("127.0.0.1", 0), Handler)
    server.fake = fake
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
