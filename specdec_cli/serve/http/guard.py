"""ASGI middleware of every route: request ids, the log line, hosts and keys."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec_cli.serve.errors import ApiError

logger = logging.getLogger("specdec_cli.serve.access")

_POLLED = frozenset({"/health", "/metrics"})
OPEN = frozenset({"/health", "/", "/docs"})
"""Paths that need no key: they tell nothing of the models, of requests or of the machine."""
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def error_response(error: ApiError) -> JSONResponse:
    """An error in OpenAI's form."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


class RequestIds:
    """Outermost: names every request, writes its line into the log, and answers 500 where everything else failed.

    Args:
        app: what comes next.
        logs_polls: whether health checks and scrapes have lines too; they come every few seconds.
    """

    def __init__(self, app: ASGIApp, logs_polls: bool = False) -> None:
        self.app = app
        self.unlogged = frozenset() if logs_polls else _POLLED

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, started, status = _request_id(Headers(scope=scope)), time.monotonic(), 0
        scope.setdefault("state", {})["request_id"] = request_id

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, named)
        except Exception as error:
            logger.exception("request failed", extra={"request_id": request_id})
            if not status:
                failed = ApiError(500, f"the server failed: `{type(error).__name__}`", code="internal_error")
                await error_response(failed)(scope, receive, named)
        finally:
            facts = {"request_id": request_id, "status": status or 499, "seconds": time.monotonic() - started}
            level = logging.DEBUG if scope["path"] in self.unlogged else logging.INFO
            logger.log(level, "%s %s", scope["method"], scope["path"], extra=facts | scope["state"].get("facts", {}))


class Hosts:
    """Refuses a Host header that is not the server's own.

    Args:
        app: what comes next.
        names: allowed ones in lower case; None for any.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str] | None) -> None:
        self.app = app
        self.names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and self.names is not None:
            given = Headers(scope=scope).getlist("host")
            if len(given) != 1 or _host_name(given[0]) not in self.names:
                shown = given[0][:100] if given else ""
                error = ApiError(400, f"the Host header `{shown}` is not this server's", code="unknown_host")
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class Keys:
    """Accepts requests with an API key, as a bearer token or as the password of basic authentication.

    Only the exact paths in `OPEN` need none, so other spellings of them gain nothing. Every key is compared, each in
    constant time. The key's hash keeps KV blocks of different keys apart (`cache_salt`).

    Args:
        app: what comes next.
        keys: the API keys; none lets everybody in.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self.app = app
        self.keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and self.keys and scope["path"] not in OPEN:
            given = _digest(_credential(Headers(scope=scope)))
            if not sum(hmac.compare_digest(given, key) for key in self.keys):
                error = ApiError(
                    401,
                    "this server requires an API key: `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["cache_salt"] = given.hex()
        await self.app(scope, receive, send)


class Heads:
    """Answers HEAD as GET is answered, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self.app({**scope, "method": "GET"}, receive, without_body)


class Crowds:
    """Refuses requests for text while there is no place for another, before they are routed and their bodies read.

    Args:
        app: what comes next.
        paths: under which text is asked for.
        refusal: the answer; None while there is a place, or where only the body can tell.
    """

    def __init__(self, app: ASGIApp, paths: frozenset[str], refusal: Callable[[], ApiError | None]) -> None:
        self.app = app
        self.paths = paths
        self.refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        asks = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self.paths
        refused = self.refusal() if asks else None
        await (self.app if refused is None else error_response(refused))(scope, receive, send)


def _request_id(headers: Headers) -> str:
    """The client's own id if it is sane, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex


def _host_name(header: str) -> str:
    """`localhost` of `localhost:8000`, `::1` of `[::1]:8000`; an unusable header gives a name that no host has."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]/@\s]+))(?::\d{1,5})?", header)
    return (found[1] or found[2]).lower() if found else ""


def _credential(headers: Headers) -> bytes:
    """The key of the one Authorization header; two could be read differently by a proxy before this server."""
    given = headers.getlist("authorization")
    scheme, _, value = (given[0] if len(given) == 1 else "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1", "replace")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(b"specdec:" + key).digest()


def log_facts(scope: Scope, **facts: Any) -> None:
    """Add to a request's line in the log."""
    scope["state"].setdefault("facts", {}).update(facts)
