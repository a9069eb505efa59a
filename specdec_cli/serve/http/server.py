"""The server's process: its socket, uvicorn around the application, signals, draining, the end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from specdec_cli.engine.garbage import leave_alone
from specdec_cli.errors import ExitCode, RunError, SpecdecError, UsageError
from specdec_cli.serve.http.app import create_app
from specdec_cli.serve.http.connection import HttpConnection
from specdec_cli.serve.http.request_handler import RequestHandler
from specdec_cli.serve.models import Model, Models
from specdec_cli.serve.settings import Settings

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_RESERVED_FILES = 24
_KEEP_ALIVE_SECONDS = 30
_CLOSING_SECONDS = 5
_MAX_HEAD_BYTES = 64 * 2**10
_TICKS_BETWEEN_WARNINGS = 100  # uvicorn's, of a tenth of a second


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. A second server on its port fails at once.

    Raises:
        UsageError: no such address on this machine.
        RunError: the port is in use, or not allowed.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise UsageError(f"`{host}` is not an address: {error.strerror}", "for example `--host 127.0.0.1`") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        hint = "choose another with --port, or stop what listens there"
        raise RunError(f"cannot listen on `{host}` port `{port}`: {error.strerror}", hint) from None
    return listener


class LimitedServer(uvicorn.Server):
    """Uvicorn with a limit on connections, which says in the log when it is reached.

    A request on a connection beyond the limit gets a 503. h11 reads the requests: it limits the size of their heads,
    and unlike httptools it keeps the body of a request that offers another protocol.

    Args:
        app: the application.
        closing_seconds: how long open requests may take once the server is to end.
        max_connections: how many clients may be connected, if the process may open as many files.
        files_each: files that a connection may take.
    """

    def __init__(self, app: FastAPI, closing_seconds: int, max_connections: int, files_each: int = 1) -> None:
        self.max_connections = min(max_connections, _num_free_files() // files_each)
        if self.max_connections < max_connections:
            message = "at most `%d` connections, not `%d`: this process may not open more files (ulimit -n)"
            logger.warning(message, self.max_connections, max_connections)
        config = uvicorn.Config(
            app,
            http=HttpConnection,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
            limit_concurrency=self.max_connections + 1,  # uvicorn refuses the connection that reaches its limit
            loop="auto",  # uvloop, where there is one
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=min(_BACKLOG, self.max_connections),
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=closing_seconds,
        )
        super().__init__(config)
        self._warned_at: int | None = None

    async def on_tick(self, counter: int) -> bool:
        """Uvicorn's own, ten times a second; a warning while there is no place for another connection."""
        is_full = len(self.server_state.connections) >= self.max_connections
        if is_full and (self._warned_at is None or abs(counter - self._warned_at) >= _TICKS_BETWEEN_WARNINGS):
            self._warned_at = counter
            logger.warning("`%d` connections are open: further requests get a 503", self.max_connections)
        return await super().on_tick(counter)


def _num_free_files() -> int:
    """Files that this process may open beside those that are open and those that a model and its libraries need."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return 2**20
    folder = Path("/proc/self/fd")
    num_open = len(list(folder.iterdir())) if folder.is_dir() else _RESERVED_FILES
    return max(limit - num_open - _RESERVED_FILES, 1)


def address(listener: socket.socket) -> str:
    """`http://host:port` of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(LimitedServer):
    """Serves models until a signal or a failure.

    The first SIGTERM or SIGINT drains: what runs may finish for a while, what comes gets 503. The second one exits.

    Args:
        models: to serve; the caller loads them.
        settings: of the server.
        listener: of `listen`.
    """

    def __init__(self, models: Models, settings: Settings, listener: socket.socket) -> None:
        app = create_app(models, settings)
        super().__init__(app, _CLOSING_SECONDS, settings.serve.max_connections)
        self._handler: RequestHandler = app.state.handler
        self.models = models
        self.settings = settings
        self.listener = listener
        self.failure: BaseException | None = None
        self._signal: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        for model in models.all:
            model.on_failure = self._failed

    @property
    def url(self) -> str:
        """Address that the server listens on."""
        return address(self.listener)

    def serve_forever(self) -> ExitCode:
        """Serve until the end.

        Returns:
            DONE after SIGTERM, INTERRUPTED after Ctrl-C.

        Raises:
            SpecdecError: the model could not be loaded, or its engine ended by an error.
        """
        self.run(sockets=[self.listener])
        if not self.models.stop():
            logger.error("the engine does not stop: a step is still running")
            os._exit(ExitCode.COULD_NOT_RUN)
        if isinstance(self.failure, SpecdecError):
            raise self.failure
        if self.failure is not None:
            message = f"{type(self.failure).__name__}: {self.failure}"
            raise RunError(f"the engine stopped after an error: {message}") from self.failure
        code = ExitCode.INTERRUPTED if self._signal == signal.SIGINT else ExitCode.DONE
        if self._handler.is_busy:
            # The interpreter would wait for the pool's threads.
            logger.warning("a request is still being prepared and is left behind")
            logging.shutdown()
            os._exit(code)
        return code

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's own serving, on a loop that signals can reach."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first drains, the second ends the process."""
        del frame
        if self._signal is not None or self._loop is None:
            os._exit(ExitCode.INTERRUPTED)
        self._signal = sig
        self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Refuse new requests, let the running ones finish, then exit; on the event loop."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        timeout = self.settings.serve.drain_timeout_seconds
        logger.info("draining", extra={"running": sum(bridge.num_open for bridge in self.models.bridges)})
        if not await self.models.drain(timeout):
            logger.warning("requests were cut off: they took longer than the drain timeout", extra={"seconds": timeout})
        await asyncio.get_running_loop().run_in_executor(None, self.models.stop)
        self.should_exit = True

    def _failed(self, model: Model, error: BaseException) -> None:
        """End the process, unless other models remain besides one that could not be loaded."""
        if model.state == "failed" and len(self.models.all) > 1:
            logger.error("model could not be loaded: %s", error, extra={"model": model.name})
            return
        self.failure = error
        self.should_exit = True


def when_ready(models: Models, tell: Callable[[], None]) -> None:
    """Call something once every model that is being loaded is there."""

    def wait() -> None:
        for model in models.all:
            model.settled.wait()
        if models.health() == "ok":
            tell()

    threading.Thread(target=wait, daemon=True).start()


def leave_loaded_alone(models: Models) -> None:
    """Once a model is loaded, no request waits for a full collection."""

    def wait(model: Model) -> None:
        model.settled.wait()
        leave_alone()

    for model in models.all:
        threading.Thread(target=wait, args=(model,), daemon=True).start()
