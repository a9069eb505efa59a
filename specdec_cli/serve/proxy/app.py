"""The application in front of another engine: our page, keys and limits, and the engine's own routes behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec_cli import __version__
from specdec_cli.serve.errors import ApiError
from specdec_cli.serve.http.app import answer_api_error, answer_http_error, guards
from specdec_cli.serve.http.routes import GENERATING, page
from specdec_cli.serve.proxy.fields import check_fields
from specdec_cli.serve.proxy.upstream import PassedOn, Upstream
from specdec_cli.serve.settings import Settings

_PASSED_POSTS = (*sorted(GENERATING), "/tokenize", "/detokenize")
_PASSED_GETS = ("/metrics", "/tokenizer_info", "/v1/models/{name:path}")


@dataclass
class Front:
    """A server in front of another engine.

    Args:
        upstream: the engine.
        settings: of this server.
        refused: fields of requests that the engine does not have, with their reasons.
        described: what `/v1/models` says about speculation.
        places: how many requests may be open; further ones get a 429.
    """

    upstream: Upstream
    settings: Settings
    refused: Mapping[str, str]
    described: Mapping[str, Any]
    places: int
    num_open: int = field(default=0, init=False)

    def refusal(self) -> ApiError | None:
        """The answer to a request for text while there is no place; None while there is one."""
        if self.num_open < self.places:
            return None
        return ApiError(429, f"`{self.num_open}` requests are open", code="queue_full", headers={"Retry-After": "1"})

    async def answer(self, request: Request) -> Response:
        """Pass a request on.

        Raises:
            ApiError: 400 for a field that the engine does not have, 499 where the client left, 502 where the engine
                does not answer.
        """
        try:
            body = await request.body()
        except ClientDisconnect:
            raise ApiError(499, "the client disconnected before its body arrived", code="client_gone") from None
        if request.url.path in GENERATING:
            check_fields(body, self.refused, self.upstream.name)
        return PassedOn(self.upstream, self.upstream.asked(request, body), self.settings.serve.request_timeout_seconds)

    async def models(self) -> Response:
        """The engine's models, and how they draft."""
        found = await self.upstream.json("/v1/models")
        data = [{**model, "speculative": dict(self.described)} for model in found["data"]]
        return JSONResponse({**found, "data": data})

    async def health(self) -> Response:
        """Whether the engine is ready for requests; needs no key."""
        is_ready = await self.upstream.is_ready()
        return JSONResponse({"status": "ok" if is_ready else "unavailable"}, status_code=200 if is_ready else 503)

    async def version(self) -> Response:
        """The engine's version, and ours."""
        return JSONResponse({**await self.upstream.json("/version"), "specdec": __version__})


class Counted:
    """Counts the requests for text that are open.

    Args:
        app: what comes next.
        front: keeps the count.
    """

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self.app, self.front = app, front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        counts = int(scope["type"] == "http" and scope["path"] in GENERATING)
        self.front.num_open += counts
        try:
            await self.app(scope, receive, send)
        finally:
            self.front.num_open -= counts


def create_front(front: Front) -> FastAPI:
    """The application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await front.upstream.close()

    app = FastAPI(
        title="specdec",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # the engine's own description says what it takes
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=[*guards(front.settings, front.refusal), Middleware(Counted, front=front)],
        exception_handlers={ApiError: answer_api_error, HTTPException: answer_http_error},
    )
    app.add_api_route("/", page, methods=["GET"])
    app.add_api_route("/health", front.health, methods=["GET"])
    app.add_api_route("/version", front.version, methods=["GET"])
    app.add_api_route("/v1/models", front.models, methods=["GET"])
    for paths, method in ((_PASSED_POSTS, "POST"), (_PASSED_GETS, "GET")):
        for path in paths:
            app.add_api_route(path, front.answer, methods=[method])
    return app
