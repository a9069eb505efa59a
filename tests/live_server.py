"""A real server of toys on a real socket, run by a thread of this process."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from fastapi import FastAPI
from toy_engine import LETTERS, TableLM
from toy_server import toy_models

from specdec_cli.engine.engine import Engine
from specdec_cli.engine.jobs.bridge import Bridge
from specdec_cli.errors import ExitCode
from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.http.bodies import Bodies
from specdec_cli.serve.http.request_handler import RequestHandler
from specdec_cli.serve.http.server import Server, listen
from specdec_cli.serve.settings import Settings

SECONDS = 20.0
JSON = {"content-type": "application/json"}


class LiveServer(Server):
    """A server with what its end gave."""

    ended: ExitCode | Exception | None = None

    @property
    def bridge(self) -> Bridge:
        return self.models.all[0].bridge

    @property
    def bodies(self) -> Bodies:
        handler: RequestHandler = cast(FastAPI, self.config.app).state.handler
        return handler.bodies

    def connect(self, timeout: float = SECONDS) -> http.client.HTTPConnection:
        host, port = self.listener.getsockname()[:2]
        return http.client.HTTPConnection(host, port, timeout=timeout)

    def post(
        self, path: str, body: dict[str, Any] | bytes, headers: dict[str, str] = JSON
    ) -> tuple[int, dict[str, Any]]:
        """Status and JSON of an answer."""
        connection = self.connect()
        try:
            connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def text(self, body: dict[str, Any]) -> str:
        """The text of a completion."""
        status, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"]


@contextmanager
def live(engine: Engine, keys: tuple[str, ...] = (), **serve: Any) -> Iterator[LiveServer]:
    """A server of an engine until the block ends, or until it ended by itself."""
    settings = Settings(Serve(port=0, **serve), keys)
    server = LiveServer(toy_models(settings, engine), settings, listen("127.0.0.1", 0))

    def serve_forever() -> None:
        try:
            server.ended = server.serve_forever()
        except Exception as error:
            server.ended = error

    thread = threading.Thread(target=serve_forever)
    thread.start()
    try:
        until(lambda: server.started)
        yield server
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive(), "the server does not end"


def send(server: LiveServer, *parts: bytes, silence: float = 0.1) -> tuple[int, bytes]:
    """The status of the first answer, and all that came until the server closed the connection or fell silent."""
    with socket.create_connection(server.listener.getsockname()[:2], timeout=5) as raw:
        for part in parts:
            raw.sendall(part)
        found = b""
        try:
            while more := raw.recv(65536):
                found += more
                raw.settimeout(silence)
        except (TimeoutError, ConnectionResetError):
            pass
    return (int(found.split(b" ", 2)[1]) if found else 0), found


def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


class HeldLM(TableLM):
    """A table that counts what its sequences hold, takes a while for a step, and does what a test plants.

    `plant` sees the rows' contexts as text before a step's logits are made, and may raise.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.held: dict[int, int] = {}
        self.plant: Callable[[list[str]], None] = lambda texts: None

    def score(self, rows):
        time.sleep(self.seconds)
        for row in rows:
            self.held[row.handle] = -(-row.num_tokens // self.block_size)
        self.plant(["".join(LETTERS[token] for token in row.as_chain()) for row in rows])
        return super().score(rows)

    def release(self, handle: int) -> None:
        self.held.pop(handle, None)

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - sum(self.held.values())
