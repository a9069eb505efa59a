"""The engine's server that requests are passed on to, and what has become of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx2
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec_cli.errors import SpecdecError
from specdec_cli.serve.errors import ApiError, ClientGoneError
from specdec_cli.serve.http.client_watch import while_connected

_CONNECT_SECONDS = 10.0
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "content-length"}
)
"""Headers of one connection and no message (RFC 9110, 7.6.1); lengths are counted again."""
_OURS = frozenset({"host", "authorization", "expect", "content-type"})
"""Headers of a request for this server: its key, and its type, which is always JSON; the engine has no key."""


class Upstream:
    """The engine's server.

    Args:
        url: `http://host:port`.
        name: the engine, for people.
        ended: why it has ended; None while it runs. It may block for a moment.
    """

    def __init__(self, url: str, name: str, ended: Callable[[], SpecdecError | None]) -> None:
        self.name = name
        self._ended = ended
        self._client = httpx2.AsyncClient(
            base_url=url,
            timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,  # a proxy of the environment leads away from this machine
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def json(self, path: str) -> Any:
        """The JSON of a route.

        Raises:
            ApiError: 502 where the engine does not answer, or with an error, or without JSON.
        """
        try:
            response = await self._client.get(path)
            response.raise_for_status()
            return response.json()
        except (httpx2.HTTPError, ValueError) as error:
            raise await self.failure(error) from None

    async def is_ready(self) -> bool:
        """Whether it says that it is."""
        try:
            return (await self._client.get("/health")).status_code == 200
        except httpx2.HTTPError:
            return False

    def request_of(self, request: Request, body: bytes) -> httpx2.Request:
        """The request for the engine.

        Args:
            request: the client's, on a route without parameters: its path is one of ours.
            body: JSON, or nothing.
        """
        left_out = _of_connection(request.headers.getlist("connection")) | _OURS
        headers = [(name, value) for name, value in request.headers.items() if name not in left_out]
        if body:
            headers.append(("content-type", "application/json"))
        url = request.scope["path"] + (f"?{request.url.query}" if request.url.query else "")
        return self._client.build_request(request.method, url, headers=headers, content=body)

    async def send(self, request: httpx2.Request) -> httpx2.Response:
        """The engine's answer, open; the caller closes it, which ends the request at the engine.

        Raises:
            ApiError: 502 where the engine does not answer.
        """
        try:
            return await self._client.send(request, stream=True)
        except httpx2.HTTPError as error:
            raise await self.failure(error) from None

    async def failure(self, error: Exception) -> ApiError:
        """An error of the connection as an answer, with the engine's own reason where it has ended."""
        ended = await asyncio.to_thread(self._ended)
        if ended is not None:
            return ApiError(502, ended.message, code="engine_ended")
        message = str(error) or type(error).__name__
        return ApiError(502, f"{self.name} broke the connection off: {message}", code="engine_unreachable")


class PassedOn(Response):
    """A request passed on to the engine, and its answer as it comes, byte by byte.

    Args:
        upstream: the engine.
        asked: the request.
        limit_seconds: how long the answer may take; None for ever.
        until_answered: closed once the answer has ended.
    """

    def __init__(
        self,
        upstream: Upstream,
        request: httpx2.Request,
        limit_seconds: float | None,
        until_answered: AsyncExitStack,
    ) -> None:
        super().__init__()
        self._upstream, self._asked, self._limit = upstream, request, limit_seconds
        self._until_answered = until_answered
        self._has_begun = self._is_stream = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer until the end, or until the client leaves or the time is up, which ends the request at the engine."""
        del scope
        try:
            with suppress(ClientGoneError):
                await while_connected(self._pass_on(send), receive, self._limit)
        except TimeoutError:
            error = ApiError(504, f"the answer took longer than `{self._limit:g}` seconds", code="timeout")
            if not self._has_begun:
                raise error from None
            if self._is_stream:
                await send({"type": "http.response.body", "body": _event(error), "more_body": False})
        finally:
            await self._until_answered.aclose()

    async def _pass_on(self, send: Send) -> None:
        answer = await self._upstream.send(self._asked)
        try:
            self._is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
            left_out = _of_connection(answer.headers.get_list("connection"))
            pairs = ((name.lower(), value) for name, value in answer.headers.raw)
            headers = [(name, value) for name, value in pairs if name.decode("latin-1") not in left_out]
            self._has_begun = True
            await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
            async for part in self._parts(answer):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await answer.aclose()

    async def _parts(self, answer: httpx2.Response) -> AsyncIterator[bytes]:
        """The answer's bytes; a stream that breaks off ends with an event that says why."""
        try:
            async for part in answer.aiter_raw():
                yield part
        except httpx2.HTTPError as error:
            failure = await self._upstream.failure(error)
            if not self._is_stream:
                raise failure from None  # its status is out: the connection breaks
            yield _event(failure)


def _event(error: ApiError) -> bytes:
    return f"\n\ndata: {json.dumps(error.body())}\n\n".encode()  # an event before it may have broken off


def _of_connection(named: Iterable[str]) -> frozenset[str]:
    """Headers that are no part of a message: the known ones, and those that its `Connection` headers name."""
    return _HOP_BY_HOP | {name.strip().lower() for value in named for name in value.split(",")}
