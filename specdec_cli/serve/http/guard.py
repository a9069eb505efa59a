"""ASGI middleware of every route: request ids, the log line, checks of a request's head, the end of a connection."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec_cli.serve.errors import ApiError

logger = logging.getLogger("specdec_cli.serve.access")

_POLLED = frozenset({"/health", "/metrics"})
OPEN = frozenset({"/health", "/", "/docs"})
"""Paths that need no key: they tell nothing of the models, of requests or of the machine."""
LINGER_BYTES, LINGER_SECONDS, _PAUSE_SECONDS = 64 * 2**20, 10.0, 1.0
"""Limits on the unread body of an answered request: bytes, seconds, and seconds of a pause."""
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def error_response(error: ApiError) -> JSONResponse:
    """An error in OpenAI's form."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


Check = Callable[[Scope], ApiError | None]
"""Looks at a request's head, and gives the error to answer it with; None lets it in."""


class RequestLog:
    """Names every request, writes its line into the log, and answers 500 where everything else failed.

    HEAD is routed as GET; the server sends no body for it.

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
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            await self.app({**scope, "method": method}, receive, named)
        except Exception as error:
            logger.exception("request failed", extra={"request_id": request_id})
            if not status:
                failed = ApiError(500, f"the server failed: `{type(error).__name__}`", code="internal_error")
                await error_response(failed)(scope, receive, named)
        finally:
            facts = {"request_id": request_id, "status": status or 499, "seconds": time.monotonic() - started}
            level = logging.DEBUG if scope["path"] in self.unlogged else logging.INFO
            logger.log(level, "%s %s", scope["method"], scope["path"], extra=facts | scope["state"].get("facts", {}))


class LingeringClose:
    """Outermost: keeps a connection open until a client has sent the body that its answer did not wait for.

    A connection that is closed while the client still sends is reset. Most clients then report that and never read the
    answer, be it a 413, a 401 or a 404. The answer itself is sent at once; what still arrives is discarded, within
    limits.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or not _sends_body(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        is_arriving, is_open = True, False

        async def watched() -> Message:
            nonlocal is_arriving
            message = await receive()
            is_arriving = message.get("more_body", False)  # a disconnect has no more
            return message

        async def left_open(message: Message) -> None:
            nonlocal is_open
            is_open = is_arriving and message["type"] == "http.response.body" and not message.get("more_body", False)
            await send({**message, "more_body": True} if is_open else message)

        await self.app(scope, watched, left_open)
        if is_open:
            num_bytes = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    while is_arriving and num_bytes < LINGER_BYTES:
                        message = await asyncio.wait_for(watched(), _PAUSE_SECONDS)
                        num_bytes += len(message.get("body", b""))
            await send({"type": "http.response.body"})


class Guard:
    """Refuses requests by their heads, with the error of the first check that gives one."""

    def __init__(self, app: ASGIApp, checks: Sequence[Check]) -> None:
        self.app = app
        self.checks = checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        refused = None
        if scope["type"] == "http":
            refused = next((error for check in self.checks if (error := check(scope)) is not None), None)
        await (self.app if refused is None else error_response(refused))(scope, receive, send)


def host_check(names: frozenset[str] | None) -> Check:
    """Refuse a Host header that is none of these names, in lower case; None allows any."""

    def check(scope: Scope) -> ApiError | None:
        hosts = Headers(scope=scope).getlist("host")
        if names is None or (len(hosts) == 1 and _host_name(hosts[0]) in names):
            return None
        shown = hosts[0][:100] if hosts else ""
        return ApiError(400, f"the Host header `{shown}` is not this server's", code="unknown_host")

    return check


def key_check(keys: Iterable[str]) -> Check:
    """Demand one of these API keys, as a bearer token or as the password of basic authentication; none lets all in.

    Only the exact paths in `OPEN` need none, so other spellings of them gain nothing. Every key is compared, each in
    constant time. The key's hash keeps KV blocks of different keys apart (`cache_salt`).
    """
    digests = [_digest(key.encode()) for key in keys]

    def check(scope: Scope) -> ApiError | None:
        if not digests or scope["path"] in OPEN:
            return None
        digest = _digest(_credential(Headers(scope=scope)))
        if not sum(hmac.compare_digest(digest, known) for known in digests):
            message = "this server requires an API key: `Authorization: Bearer KEY`"
            return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        scope.setdefault("state", {})["cache_salt"] = digest.hex()
        return None

    return check


def queue_check(paths: frozenset[str], refusal: Callable[[], ApiError | None]) -> Check:
    """Refuse a request for text, under these paths, while there is no place for another; its body is not read."""

    def check(scope: Scope) -> ApiError | None:
        return refusal() if scope["method"] == "POST" and scope["path"] in paths else None

    return check


def _sends_body(headers: Headers) -> bool:
    """Whether a client sends a body, and does not wait for a `100 Continue` before it does."""
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""
    return has_body and headers.get("expect", "").lower() != "100-continue"


def _request_id(headers: Headers) -> str:
    """The client's own id if it is sane, else a new one."""
    request_id = headers.get("x-request-id", "")
    return request_id if _SANE_ID.fullmatch(request_id) else uuid.uuid4().hex


def _host_name(header: str) -> str:
    """`localhost` of `localhost:8000`, `::1` of `[::1]:8000`; an unusable header gives a name that no host has."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]/@\s]+))(?::\d{1,5})?", header)
    return (match[1] or match[2]).lower() if match else ""


def _credential(headers: Headers) -> bytes:
    """The key of the one Authorization header; two could be read differently by a proxy before this server."""
    headers_sent = headers.getlist("authorization")
    scheme, _, value = (headers_sent[0] if len(headers_sent) == 1 else "").partition(" ")
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
