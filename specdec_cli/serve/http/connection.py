"""One client's connection: uvicorn's own, with bounds for those who begin to speak and never end."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specdec_cli.serve.answer.respond import compact
from specdec_cli.serve.errors import ApiError

logger = logging.getLogger("specdec_cli.serve")

HEAD_SECONDS = 20.0
"""How long the head of a request may take, from the connection or from its first byte on."""
LINGER_SECONDS = 2.0
"""How long a client that was answered before its body ended may take to read that."""
WARNING_SECONDS = 10.0
"""Least time between two lines in the log about too many connections."""
MAX_HEAD_BYTES = 64 * 2**10
"""Longest head of a request, and most that may come of one (extensions of chunks, trailers) without being its body."""


class _Part(enum.Enum):
    """The part of a request that is being received."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class Connection(HttpToolsProtocol):
    """Speaks HTTP/1.1. A head that does not arrive is a 408, and no body is read after the answer.

    Requests that come before the one ahead of them was answered wait for that; what is no HTTP is refused after them.
    An offer to speak another protocol (`Upgrade`) is passed over, as RFC 9110 (7.8) allows.

    Beyond `max_connections` the newest connection replaces the connection that has been idle, or in the middle of a
    request, for longest: clients that stall do not keep others out. Requests that are being
    answered are never ended; if there are only those, the newest connection gets a 503.
    """

    _next_warning = -math.inf

    def __init__(self, *arguments: Any, max_connections: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.max_connections = max_connections
        self._part = _Part.NOTHING
        self._num_bodiless = 0
        self._answering: Any = None
        self._deadline: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is here."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._expect_head()
        if len(self.connections) > self.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, whichever of its requests is being answered."""
        self._forget_deadline()
        if self._answering is not None:
            self._answering.disconnected = not self._answering.response_complete
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of several."""
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        self._num_bodiless += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, ApiError) else _no_http("this is not an HTTP request"))
        else:
            if self._num_bodiless > MAX_HEAD_BYTES:
                self._refuse(_head_is_long())
            elif self._part is _Part.NOTHING and not self._is_answering():
                self._expect_head()

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError("this is not a proxy") from None
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self._parse(head + data[upgrade.args[0] :])

    def _head_without_upgrade(self) -> bytes:
        """The head that was just received, without the header that made the parser stop after it."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # What the parser calls
    def on_message_begin(self) -> None:
        """A request's first bytes."""
        super().on_message_begin()
        self._part = _Part.HEAD
        self._expect_head()

    def on_headers_complete(self) -> None:
        """A whole head: unless it offers another protocol, its request is answered from here on."""
        if self.parser.should_upgrade():
            return
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            raise _head_is_long()
        if not self.url.startswith(b"/"):
            raise _no_http("a request names a path, not a whole address")
        super().on_headers_complete()
        self.headers = []  # trailers are no headers
        self._part = _Part.BODY
        self._forget_deadline()

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._num_bodiless = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request's last byte, or that of a head which offers another protocol."""
        if self._part is _Part.BODY:
            self._num_bodiless = 0
            self._part = _Part.NOTHING
            super().on_message_complete()

    # What answering calls
    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """An answer is out; what the client still sends of its body is of no use."""
        super().on_response_complete()
        self._since = self.loop.time()
        if self._refusal is not None:
            self._refuse(self._refusal)
        elif self._is_answered_early():
            self.loop.call_later(LINGER_SECONDS, self._end_early, self.cycle)

    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def _is_answered_early(self) -> bool:
        return self._part is _Part.BODY and self.cycle.response_complete

    def _end_early(self, cycle: Any) -> None:
        if self.cycle is cycle and self._is_answered_early():
            self.transport.abort()

    # Refusals
    def _expect_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_is_late(self) -> None:
        said = f"the head of the request did not arrive within `{HEAD_SECONDS:g}` seconds"
        self._refuse(ApiError(408, said, code="timeout"))

    def _make_room(self) -> None:
        """End the connection that has sent no whole request for longest, or else this new one."""
        others = (one for one in self.connections if isinstance(one, Connection) and one is not self and one._is_idle())
        ended = min(others, key=lambda one: one._since, default=self)
        self.connections.discard(ended)
        ended._refuse(ApiError(503, f"more than `{self.max_connections}` connections are open", code="overloaded"))
        if ended.transport.get_write_buffer_size():
            ended.transport.abort()
        now = self.loop.time()
        if now >= Connection._next_warning:
            Connection._next_warning = now + WARNING_SECONDS
            said = "more than `%d` connections are open: those that send no whole request are ended"
            logger.warning(said, self.max_connections)

    def _is_idle(self) -> bool:
        """Whether nothing is answered here: no request has come, or the last one is still arriving."""
        return (self._part is _Part.BODY and not self.cycle.response_started) or not self._is_answering()

    def _refuse(self, error: ApiError) -> None:
        """Answer what is being received, after what came before it, and end the connection; nothing more is read."""
        self._refusal = error
        is_answered = False
        if self._part is _Part.BODY:
            if self.pipeline and self.pipeline[0][0] is self.cycle:
                self.pipeline.popleft()
            else:
                is_answered, self._answering = self.cycle.response_started, None
            self._part = _Part.NOTHING
        if self._is_answering() or self.transport.is_closing():
            return
        if not is_answered:
            body = compact(error.body())
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def _no_http(said: str) -> ApiError:
    return ApiError(400, said, code="invalid_http")


def _head_is_long() -> ApiError:
    return _no_http(f"the head of the request is longer than `{MAX_HEAD_BYTES}` bytes")
