"""The HTTP application: routes behind their guards, and every error in OpenAI's form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from specdec_cli import __version__
from specdec_cli.errors import SpecdecError
from specdec_cli.serve.errors import ApiError, as_api_error
from specdec_cli.serve.http.guard import (
    Guard,
    LingeringClose,
    RequestLog,
    error_response,
    host_check,
    key_check,
    queue_check,
)
from specdec_cli.serve.http.openapi import describe
from specdec_cli.serve.http.request_handler import RequestHandler
from specdec_cli.serve.http.routes import GENERATING, router
from specdec_cli.serve.models import Models
from specdec_cli.serve.settings import Settings


def create_app(models: Models, settings: Settings) -> FastAPI:
    """The application.

    Args:
        models: to serve; the caller loads and stops them.
        settings: keys, limits, times.
    """
    handler = RequestHandler(models, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        handler.close()

    app = new_app(settings, handler.refusal, lifespan)
    app.state.handler = handler
    app.include_router(router)
    app.openapi = partial(describe, app)  # type: ignore[method-assign]
    return app


def new_app(
    settings: Settings,
    refusal: Callable[[], ApiError | None],
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
    **options: Any,
) -> FastAPI:
    """An application without routes, behind its guards."""
    return FastAPI(
        title="specdec",
        version=__version__,
        docs_url=None,  # these pages load scripts from elsewhere; ours do not
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=guards(settings, refusal),
        exception_handlers=ERROR_HANDLERS,
        **options,
    )


def guards(settings: Settings, refusal: Callable[[], ApiError | None]) -> list[Middleware]:
    """Middleware, outermost first: a preflight has no key; without a key no body is read, no queue state revealed.

    Args:
        settings: keys, hosts, origins and limits.
        refusal: the answer to requests for text while there is no place for another.
    """
    guards = [Middleware(LingeringClose), Middleware(RequestLog, logs_polls=settings.serve.log_polls)]
    if settings.serve.cors_origins:
        guards.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.serve.cors_origins),
                allow_methods=["GET", "HEAD", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "x-specdec-ignored", "retry-after"],
            )
        )
    checks = (host_check(settings.hosts), key_check(settings.api_keys), queue_check(GENERATING, refusal))
    return [*guards, Middleware(Guard, checks=checks)]


async def answer_error(_: Request, error: Exception) -> Response:
    """An error of a request or of the engine, in OpenAI's form."""
    return error_response(as_api_error(error))


async def answer_http_error(request: Request, error: Exception) -> Response:
    """The framework's own errors: no such route, or another method."""
    assert isinstance(error, HTTPException), "the handler is registered for HTTPException"
    words = {
        404: f"there is no route `{request.url.path[:200]}`",
        405: f"`{request.url.path[:200]}` does not take `{request.method[:20]}`",
    }
    message = words.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))


ERROR_HANDLERS: dict[Any, Any] = {
    ApiError: answer_error,
    SpecdecError: answer_error,
    HTTPException: answer_http_error,
}
"""What answers an exception of a route, by its class."""
