"""The objects that every route needs: models, settings, a small pool, and the path from a request to an answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from specdec_cli.engine.jobs.ticket import Ticket
from specdec_cli.errors import QueueFull, SpecdecError
from specdec_cli.serve.answer.respond import CompletionAnswer
from specdec_cli.serve.errors import ApiError, as_api_error, bad_field
from specdec_cli.serve.http.bodies import Bodies
from specdec_cli.serve.http.grammar_queue import GrammarQueue
from specdec_cli.serve.http.reply import Reply
from specdec_cli.serve.http.watched_pool import WatchedPool
from specdec_cli.serve.models import Model, Models
from specdec_cli.serve.protocol import AnyBody, GenerationBody
from specdec_cli.serve.request.prepare import ModelInfo, Prepared
from specdec_cli.serve.request.read import parse
from specdec_cli.serve.settings import Settings

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Prepare = Callable[[Any, ModelInfo, str, str], Prepared]
_LARGE_BODY_BYTES = 16 * 2**10
_MAX_HEADER_CHARS = 1000


class RequestHandler:
    """Reads requests, prepares them off the event loop, and queues their jobs; every route works with it."""

    def __init__(self, models: Models, settings: Settings, num_workers: int = 4) -> None:
        self.models = models
        self.settings = settings
        self.bodies = Bodies(settings.serve.max_body_bytes)
        self.pool = WatchedPool(num_workers, "specdec-prepare")
        self.grammars = GrammarQueue(settings.serve)

    def health(self) -> str:
        """Health of the models, or `stuck` if all threads of a pool have worked on one item for too long."""
        state = self.models.health()
        stuck = max(self.pool.stuck_seconds, self.grammars.pool.stuck_seconds)
        return "stuck" if state == "ok" and stuck > self.settings.serve.hang_timeout_seconds else state

    @property
    def is_busy(self) -> bool:
        """Whether a thread of a pool works."""
        return self.pool.is_busy or self.grammars.pool.is_busy

    def close(self) -> None:
        """Begin no further work."""
        for pool in (self.pool, self.grammars.pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def in_pool(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Do work in the pool, off the event loop.

        Raises:
            ApiError: the request's time is up.
            Exception: what the work raised.
        """
        future = asyncio.get_running_loop().run_in_executor(self.pool, work, *arguments)
        try:
            return await asyncio.wait_for(future, self.settings.serve.request_timeout_seconds)
        except TimeoutError:
            raise ApiError(504, "the request could not be prepared in time", code="timeout") from None

    @asynccontextmanager
    async def read(self, request: Request, kind: type[AnyBody]) -> AsyncIterator[tuple[AnyBody, dict[str, str]]]:
        """A typed body, and the header that lists its unknown fields; within the block the request is prepared.

        Raises:
            ApiError: as `Bodies.read` and `parse`.
        """
        limits = self.settings.serve
        async with self.bodies.read(request) as body, self.bodies.turn(body):
            aside = len(body) > _LARGE_BODY_BYTES
            parsed, ignored = await self.in_pool(parse, kind, body, limits) if aside else parse(kind, body, limits)
            yield parsed, ({"x-specdec-ignored": _header_text(ignored)} if ignored else {})

    async def answer(
        self,
        request: Request,
        kind: type[GenerationBody],
        prepare: Prepare,
        answer: type[CompletionAnswer] = CompletionAnswer,
    ) -> Response:
        """Answer a request for text.

        Args:
            request: of HTTP.
            kind: the model of its body.
            prepare: makes its jobs.
            answer: turns what is decoded into documents.

        Raises:
            ApiError: what is wrong with it.
            QueueFull: it finds no place.
            Unavailable: the model is not loaded, or the server drains.
        """
        async with self.read(request, kind) as (body, headers):
            began = time.monotonic()
            model = self.models.find(body.model)
            try:
                tickets, prepared = await self._submit(request, body, model, prepare)
            except (ApiError, SpecdecError) as error:
                status = as_api_error(error).status
                if status in (429, 503):
                    model.metrics.refused(status)
                raise
            serve = self.settings.serve
            return Reply(tickets, answer(prepared, serve.stream_interval == 1), serve, headers=headers, began=began)

    def refusal(self) -> ApiError | None:
        """A 429 for a request for text that was not read yet: where it can mean one model only, and that one is full.

        Requests that are being prepared have places too: of a crowd that comes at once few bodies are read.
        """
        model = self.models.all[0]
        bridge = model.loaded
        if len(self.models.all) > 1 or bridge is None or not bridge.is_taking:  # what it says then is no 429
            return None
        if bridge.num_open + model.num_preparing < bridge.capacity:
            return None
        model.metrics.refused(429)
        return as_api_error(QueueFull(bridge.num_open))

    async def _submit(
        self, request: Request, body: GenerationBody, model: Model, prepare: Prepare
    ) -> tuple[list[Ticket], Prepared]:
        """Queue what a request asks for; nothing is awaited between that and its reply."""
        bridge, info = model.bridge, model.info
        bridge.check_room(1 + model.num_preparing)
        model.num_preparing += 1
        try:
            prepared = await self.in_pool(prepare, body, info, request.state.request_id, _salt(request))
            if len(prepared.jobs) > bridge.capacity:
                message = f"asks for `{len(prepared.jobs)}` outputs, and this server holds {bridge.capacity} at most"
                raise bad_field("n" if prepared.plan.n > 1 else "prompt", message)
            if (constraint := prepared.constraint) is not None:
                assert info.tokenizer is not None, "the constraint was checked"
                prepared = prepared.constrained(await self.grammars.compile(request, constraint, info.tokenizer))
            if self.settings.serve.log_prompts:
                await self._log_prompts(request, prepared, info)
            return bridge.submit_all(prepared.jobs), prepared
        finally:
            model.num_preparing -= 1

    async def _log_prompts(self, request: Request, prepared: Prepared, info: ModelInfo) -> None:
        for token_ids in prepared.plan.prompts:
            text = None if info.tokenizer is None else await self.in_pool(info.tokenizer.decode, token_ids, False)
            known: dict[str, Any] = {"token_ids": list(token_ids)} if text is None else {"prompt": text}
            logger.info("prompt", extra={"request_id": request.state.request_id} | known)


def handler_of(request: Request) -> RequestHandler:
    """The handler of the app that serves a request."""
    handler = request.app.state.handler
    assert isinstance(handler, RequestHandler), "create_app puts a handler into the app's state"
    return handler


def _salt(request: Request) -> str:
    return str(getattr(request.state, "cache_salt", ""))


def _header_text(names: list[str]) -> str:
    """Field names of strangers as a header may carry them."""
    text = ", ".join(name.encode("ascii", "backslashreplace").decode() for name in names)
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:_MAX_HEADER_CHARS]
