"""Bodies of requests: how long one may take and be, and how much memory all that are unfinished may take together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from specdec_cli.serve.errors import ApiError, ClientGoneError

logger = logging.getLogger("specdec_cli.serve")

BODY_SECONDS = 60.0
"""How long a body may take."""
BODIES_AT_ONCE = 16
"""All bodies together may take as much memory as so many of the longest."""
_UNCOUNTED_BYTES = 64 * 2**10
"""Of each body; a short request is never refused for the memory that long ones take."""
_LARGE_BYTES = 256 * 2**10
"""Bodies longer than this are parsed and prepared one after the other."""


class Bodies:
    """Reads bodies, and counts their bytes until the requests in them are prepared.

    Where newer bodies need the memory, the body that has been arriving for longest is given up: a client that stalls
    loses to a client that sends.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._sizes: dict[asyncio.Timeout, int] = {}  # counted bytes, by the time limit of each body
        self._arriving: dict[asyncio.Timeout, None] = {}  # those that have not ended, oldest first
        self._large = asyncio.Lock()

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a JSON request; its bytes count until the block ends.

        Raises:
            ApiError: 415 for another content type or a compressed body, 413 for one that is too long, 408 for one that
                does not arrive in time, 503 where other bodies take all memory, 499 (for the log) where the client
                went away.
        """
        _check_headers(request.headers, self.max_bytes)
        limit = asyncio.timeout(BODY_SECONDS)
        try:
            yield await self._receive(request, limit)
        finally:
            self._arriving.pop(limit, None)
            self.num_bytes -= self._sizes.pop(limit, 0)

    @asynccontextmanager
    async def turn(self, body: bytes) -> AsyncIterator[None]:
        """The time in which a body is parsed and its request prepared: long ones take it one after the other."""
        if len(body) <= _LARGE_BYTES:
            yield
        else:
            async with self._large:
                yield

    async def _receive(self, request: Request, limit: asyncio.Timeout) -> bytes:
        parts: list[bytes] = []
        size = 0
        self._arriving[limit], self._sizes[limit] = None, 0
        try:
            async with limit:
                async for part in request.stream():
                    size += len(part)
                    if size > self.max_bytes:
                        raise _too_long(self.max_bytes)
                    self._count(limit, size)
                    parts.append(part)
        except ClientDisconnect:
            raise ClientGoneError("its body arrived") from None
        except TimeoutError:
            if limit not in self._sizes:
                raise ApiError(
                    408, "the body was still arriving when newer requests needed its memory", code="timeout"
                ) from None
            raise ApiError(408, f"the body did not arrive within `{BODY_SECONDS:g}` seconds", code="timeout") from None
        del self._arriving[limit]
        return b"".join(parts)

    def _count(self, limit: asyncio.Timeout, size: int) -> None:
        """Count a body of so many bytes; make room for it by giving up the oldest ones that are arriving."""
        if limit not in self._sizes:
            return  # given up, and about to hear of it
        grown = max(0, size - _UNCOUNTED_BYTES) - self._sizes[limit]
        self._sizes[limit] += grown
        self.num_bytes += grown
        most = BODIES_AT_ONCE * self.max_bytes
        while grown and self.num_bytes > most:
            oldest = next((body for body in self._arriving if body is not limit and self._sizes[body]), None)
            if oldest is None:
                message = "the bodies of other requests take all the memory that they may"
                raise ApiError(503, message, code="overloaded", headers={"Retry-After": "1"})
            logger.warning("a body that was arriving is given up: all together reached `%d` bytes", most)
            del self._arriving[oldest]
            self.num_bytes -= self._sizes.pop(oldest)
            oldest.reschedule(0)  # time limits of the past end at once


def _check_headers(headers: Headers, max_bytes: int) -> None:
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON: send `Content-Type: application/json`", code="content_type")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        message = f"the body must not be compressed: leave out `Content-Encoding: {encoding[:50]}`"
        raise ApiError(415, message, code="content_encoding")
    announced = headers.get("content-length", "0")
    if announced.isdigit() and int(announced[:19]) > max_bytes:
        raise _too_long(max_bytes)


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than `{max_bytes}` bytes", code="body_too_large")
