"""An HTTP proxy in a thread that reaches nobody: it writes down what it is asked for and answers 502, or forwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from typed import not_none


class Proxy(ThreadingHTTPServer):
    daemon_threads = True
    target: str | None
    asked: list[str]
    url: str


class ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes, kind: str = "text/html") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_CONNECT(self) -> None:
        self.server.asked.append(self.path)
        self.answer(403, b"<h1>no such place</h1>")

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.server.target is None:
            self.answer(502, b"<h1>Bad gateway of the proxy</h1>")
            return
        parts = urlsplit(self.server.target)
        connection = HTTPConnection(not_none(parts.hostname), parts.port)
        connection.request(self.command, urlsplit(self.path).path, body or None, {"content-type": "application/json"})
        found = connection.getresponse()
        self.answer(found.status, found.read(), found.getheader("content-type", ""))
        connection.close()

    def do_POST(self) -> None:
        self.do_GET()

    def do_HEAD(self) -> None:
        self.do_GET()


@contextmanager
def proxying(target: str | None = None) -> Iterator[Proxy]:
    """A proxy with `url` and what it was `asked`; everything goes to the target where one is given."""
    server = Proxy(("127.0.0.1", 0), ProxyHandler)
    server.target, server.asked = target, []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
