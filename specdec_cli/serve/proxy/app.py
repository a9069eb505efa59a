"""The application in front of another engine: our page, keys and limits, and the engine's own routes behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec_cli import __version__
from specdec_cli.serve.errors import ApiError, unknown_model
from specdec_cli.serve.http.app import new_app
from specdec_cli.serve.http.bodies import Bodies
from specdec_cli.serve.http.routes import GENERATING, page
from specdec_cli.serve.proxy.fields import ProxiedEngine, check_fields, salted
from specdec_cli.serve.proxy.upstream import PassedOn, Upstream
from specdec_cli.serve.request.read import read_json
from specdec_cli.serve.settings import Settings

_PASSED_POSTS = (*sorted(GENERATING), "/tokenize", "/detokenize")
_PASSED_GETS = ("/metrics", "/tokenizer_info")
_LARGE_BODY_BYTES = 16 * 2**10


@dataclass
class Front:
    """A server in front of another engine.

    Args:
        upstream: the engine.
        settings: of this server.
        engine: its fields and routes that differ from ours.
        described: what `/v1/models` says about speculation.
        places: how many requests may be open; further ones get a 429.
    """

    upstream: Upstream
    settings: Settings
    engine: ProxiedEngine
    described: Mapping[str, Any]
    places: int
    num_open: int = field(default=0, init=False)
    bodies: Bodies = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.settings.serve.max_body_bytes)

    def refusal(self) -> ApiError | None:
        """The answer to a request for text while there is no place; None while there is one."""
        if self.num_open < self.places:
            return None
        return ApiError(429, f"`{self.num_open}` requests are open", code="queue_full", headers={"Retry-After": "1"})

    async def answer(self, request: Request) -> Response:
        """Pass a request with a body on. It takes a place once its body is here, until its answer ends.

        Raises:
            ApiError: as `Bodies.read` and `read_json`; 400 for a field that the engine does not have, 429 where there
                is no place, 502 where the engine does not answer.
        """
        async with AsyncExitStack() as until_answered:
            body = await until_answered.enter_async_context(self.bodies.read(request))
            async with self.bodies.turn(body):
                limits = self.settings.serve
                aside = len(body) > _LARGE_BODY_BYTES
                document = await asyncio.to_thread(read_json, body, limits) if aside else read_json(body, limits)
                if request.scope["path"] in GENERATING:
                    check_fields(document, self.engine.refused, self.upstream.name)
                    body = salted(body, document, str(getattr(request.state, "cache_salt", "")))
                    self._take_place(until_answered)
            return self._passed(request, body, until_answered.pop_all())

    async def get(self, request: Request) -> Response:
        """Pass a request without a body on."""
        return self._passed(request, b"", AsyncExitStack())

    def _passed(self, request: Request, body: bytes, until_answered: AsyncExitStack) -> Response:
        engine_request = self.upstream.request_of(request, body)
        return PassedOn(self.upstream, engine_request, self.settings.serve.request_timeout_seconds, until_answered)

    def _take_place(self, until_answered: AsyncExitStack) -> None:
        if (refused := self.refusal()) is not None:
            raise refused
        self.num_open += 1
        until_answered.callback(self._leave_place)

    def _leave_place(self) -> None:
        self.num_open -= 1

    async def models(self) -> Response:
        """The engine's models, and how they draft."""
        return JSONResponse(await self._models())

    async def model(self, name: str) -> Response:
        """One of the models, found in the list of them: a client's name is never part of a path of the engine.

        Raises:
            ApiError: 404 for an unknown one.
        """
        models = {model["id"]: model for model in (await self._models())["data"]}
        if name not in models:
            raise unknown_model(name, tuple(models))
        return JSONResponse(models[name])

    async def _models(self) -> dict[str, Any]:
        listing = await self.upstream.json("/v1/models")
        return {**listing, "data": [{**model, "speculative": dict(self.described)} for model in listing["data"]]}

    async def health(self) -> Response:
        """Whether the engine is ready for requests; needs no key."""
        is_ready = await self.upstream.is_ready()
        return JSONResponse({"status": "ok" if is_ready else "unavailable"}, status_code=200 if is_ready else 503)

    async def version(self) -> Response:
        """The engine's version, and ours."""
        told = await self.upstream.json(self.engine.version_path)
        return JSONResponse({"version": told[self.engine.version_key], "specdec": __version__})


def create_front(front: Front) -> FastAPI:
    """The application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await front.upstream.close()

    # The engine's own description says what it takes.
    app = new_app(front.settings, front.refusal, lifespan, openapi_url=None)
    app.add_api_route("/", page, methods=["GET"])
    app.add_api_route("/health", front.health, methods=["GET"])
    app.add_api_route("/version", front.version, methods=["GET"])
    app.add_api_route("/v1/models", front.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", front.model, methods=["GET"])
    for path in _PASSED_POSTS:
        app.add_api_route(path, front.answer, methods=["POST"])
    for path in _PASSED_GETS:
        app.add_api_route(path, front.get, methods=["GET"])
    return app
