"""The HTTP application: routes behind their guards, and every error in OpenAI's form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from specdec_cli import __version__
from specdec_cli.serve.errors import ApiError
from specdec_cli.serve.http.desk import Desk
from specdec_cli.serve.http.guard import Crowds, Heads, Hosts, Keys, RequestIds, error_response
from specdec_cli.serve.http.openapi import describe
from specdec_cli.serve.http.routes import GENERATING, router
from specdec_cli.serve.models import Models
from specdec_cli.serve.settings import Settings


def create_app(models: Models, settings: Settings) -> FastAPI:
    """The application.

    Args:
        models: to serve; the caller loads and stops them.
        settings: keys, limits, times.
    """
    desk = Desk(models, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        desk.close()

    app = FastAPI(
        title="specdec",
        version=__version__,
        docs_url=None,  # these pages load scripts from elsewhere; ours do not
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=guards(settings, desk.refusal),
        exception_handlers={ApiError: answer_api_error, HTTPException: answer_http_error},
    )
    app.state.desk = desk
    app.include_router(router)
    app.openapi = partial(describe, app)  # type: ignore[method-assign]
    return app


def guards(settings: Settings, refusal: Callable[[], ApiError | None]) -> list[Middleware]:
    """From the outside in: a preflight has no key, and without a key no body is read and no queue state is revealed.

    Args:
        settings: keys, hosts, origins and limits.
        refusal: the answer to requests for text while there is no place for another.
    """
    guards = [Middleware(RequestIds, logs_polls=settings.serve.log_polls), Middleware(Hosts, names=settings.hosts)]
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
    guards.append(Middleware(Keys, keys=settings.api_keys))
    guards.append(Middleware(Crowds, paths=GENERATING, refusal=refusal))
    guards.append(Middleware(Heads))
    return guards


async def answer_api_error(_: Request, error: Exception) -> Response:
    """An error in OpenAI's form."""
    assert isinstance(error, ApiError), "the handler is registered for ApiError"
    return error_response(error)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """The framework's own errors: no such route, or another method."""
    assert isinstance(error, HTTPException), "the handler is registered for HTTPException"
    words = {
        404: f"there is no route `{request.url.path[:200]}`",
        405: f"`{request.url.path[:200]}` does not take `{request.method[:20]}`",
    }
    message = words.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))
