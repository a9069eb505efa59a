"""The process of a server in front of another engine: it ends by a signal, or with the engine."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType

from specdec_cli.errors import ExitCode, SpecdecError
from specdec_cli.serve.http.server import LimitedServer
from specdec_cli.serve.proxy.app import Front, create_front

_WATCH_SECONDS = 0.5
_LAST_WORDS_SECONDS = 2


class FrontServer(LimitedServer):
    """Serves until a signal, or until the engine ends.

    The first SIGTERM or SIGINT lets open requests finish for the drain timeout; the second one ends them.

    Args:
        front: the application's state.
        listener: of `listen`.
        ended: why the engine has ended; None while it runs. It must not block for long.
    """

    def __init__(self, front: Front, listener: socket.socket, ended: Callable[[], SpecdecError | None]) -> None:
        serve = front.settings.serve
        closing_seconds = max(1, round(serve.drain_timeout_seconds))
        super().__init__(create_front(front), closing_seconds, serve.max_connections, files_each=2)
        self.front = front
        self.listener = listener
        self._ended = ended
        self._signal: int | None = None
        self._failure: SpecdecError | None = None

    def serve_forever(self) -> ExitCode:
        """Serve until the end.

        Returns:
            DONE after SIGTERM, INTERRUPTED after Ctrl-C.

        Raises:
            SpecdecError: the engine ended.
        """
        self.run(sockets=[self.listener])
        if self._failure is not None:
            raise self._failure
        return ExitCode.INTERRUPTED if self._signal == signal.SIGINT else ExitCode.DONE

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's own serving, and a look at the engine now and then."""
        watching = asyncio.create_task(self._watch())
        try:
            await super().serve(sockets)
        finally:
            watching.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first drains, the second ends what is open."""
        del frame
        self.force_exit = self._signal is not None
        self._signal = self._signal or sig
        self.should_exit = True

    async def _watch(self) -> None:
        while self._failure is None:
            await asyncio.sleep(_WATCH_SECONDS)
            self._failure = await asyncio.to_thread(self._ended)
        await asyncio.sleep(_LAST_WORDS_SECONDS)  # open streams say why they end
        self.should_exit = True
