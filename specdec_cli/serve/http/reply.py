"""An answer while it is decoded: whole or as a stream; a client that goes away ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec_cli.engine.jobs.ticket import Placed, Ticket, TicketGroup
from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.answer.respond import CompletionAnswer, compact
from specdec_cli.serve.errors import ApiError, ClientGoneError
from specdec_cli.serve.http.client_watch import while_connected
from specdec_cli.serve.http.guard import log_facts

Written = TypeVar("Written")

_PING = b": ping\n\n"
_LAST_EVENT_SECONDS = 1.0
"""How long a client may take to read that its time is up."""


class Reply(Response):
    """Sends what an engine decodes for one request.

    Args:
        tickets: of the request's jobs.
        answer: turns their deltas into documents.
        serve: the server's times and intervals.
        headers: of the response, beside the usual ones.
        began: when the request was there, by time.monotonic; its time counts from then.
    """

    def __init__(
        self,
        tickets: Sequence[Ticket],
        answer: CompletionAnswer,
        serve: Serve,
        *,
        headers: Mapping[str, str],
        began: float,
    ) -> None:
        kind = "text/event-stream; charset=utf-8" if answer.streams else "application/json"
        quiet = {"cache-control": "no-cache", "x-accel-buffering": "no"} if answer.streams else {}
        super().__init__(headers={**headers, **quiet}, media_type=kind)
        del self.headers["content-length"]
        self._tickets = tickets
        self._answer = answer
        self._serve = serve
        self._began = began
        self._has_begun = False
        self._last_sent = 0.0
        self._parts: list[bytes] = []  # of a stream, not sent yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer until the response ends, the client disconnects, or the time is up."""
        work = self._stream(send) if self._answer.streams else self._whole(send)
        left = self._seconds_left()
        try:
            with suppress(ClientGoneError):
                await while_connected(work, receive, None if left is None else left + _LAST_EVENT_SECONDS)
        except TimeoutError:  # the client reads too slowly for a last event, or the work does not end
            if not self._has_begun:
                raise self._late() from None
        finally:
            for ticket in self._tickets:
                ticket.cancel()
            log_facts(scope, **self._facts())

    async def _whole(self, send: Send) -> None:
        group = TicketGroup(self._tickets)
        while True:
            for place, delta in group.take():
                self._answer.observe(place, delta)
            if group.is_done:
                break
            await self._wait(group.wake, None)
        body = await self._aside(lambda: compact(self._answer.document()), self._has_logprobs)
        self.headers["content-length"] = str(len(body))
        await self._begin(send)
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        """Write all parts that are ready at once, and a comment line after each silence.

        Headers wait for the first token, or for the first comment, so that an early error still has its status.
        """
        group = TicketGroup(self._tickets, self._serve.stream_interval or 1)
        self._last_sent = time.monotonic()
        try:
            while not group.is_done:
                batch = group.take()
                if not self._has_begun and batch and (error := batch[0][1].error) is not None:
                    raise self._answer.refusal(error)
                is_silent = time.monotonic() - self._last_sent >= self._serve.ping_interval_seconds
                if not self._has_begun and (batch or is_silent):
                    await self._begin(send)
                    self._parts += map(self._answer.event, self._answer.opening())
                is_long = any(delta.prompt_logprobs for _, delta in batch)
                await self._aside(partial(self._write, batch), is_long)
                if self._answer.is_done:
                    break
                if is_silent and not batch:
                    self._parts.append(_PING)
                if self._has_begun and self._parts:
                    await self._send_parts(send)
                await self._wait(group.wake, self._last_sent + self._serve.ping_interval_seconds - time.monotonic())
            self._parts += map(self._answer.event, self._answer.closing())
        except ApiError as error:
            if not self._has_begun:
                raise
            self._parts.append(self._answer.failure(error))
        self._parts.append(self._answer.end)
        await self._send_parts(send, is_last=True)

    def _write(self, batch: Sequence[Placed]) -> None:
        """Chunks of deltas, up to one that carries an error."""
        for place, delta in batch:
            self._parts += map(self._answer.event, self._answer.chunks(place, delta))

    async def _wait(self, wake: asyncio.Event, seconds: float | None) -> None:
        """Wait for deltas, so many seconds at most.

        Raises:
            ApiError: the time of the request is up.
        """
        left = self._seconds_left()
        try:
            async with asyncio.timeout(min((limit for limit in (left, seconds) if limit is not None), default=None)):
                await wake.wait()
        except TimeoutError:
            if left is not None and self._seconds_left() == 0:
                raise self._late() from None

    def _late(self) -> ApiError:
        limit = self._serve.request_timeout_seconds
        return ApiError(504, f"the answer took longer than `{limit:g}` seconds", code="timeout")

    def _seconds_left(self) -> float | None:
        """How long the answer may still take; None for ever."""
        limit = self._serve.request_timeout_seconds
        return None if limit is None else max(0.0, self._began + limit - time.monotonic())

    @property
    def _has_logprobs(self) -> bool:
        jobs = (ticket.job for ticket in self._tickets)
        return any(job.prompt_logprobs is not None or job.params.logprobs is not None for job in jobs)

    async def _aside(self, write: Callable[[], Written], is_long: bool) -> Written:
        """The text to write. Formatting many log-probabilities takes a while, so it does not run on the event loop."""
        return await asyncio.to_thread(write) if is_long else write()

    async def _begin(self, send: Send) -> None:
        self._has_begun = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _send_parts(self, send: Send, is_last: bool = False) -> None:
        data = b"".join(self._parts)
        self._parts.clear()
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self._last_sent = time.monotonic()

    def _facts(self) -> dict[str, int]:
        records = [ticket.record for ticket in self._tickets]
        return {
            "prompt_tokens": sum(record.num_prompt_tokens for record in records),
            "completion_tokens": sum(record.num_output_tokens for record in records),
            "accepted_tokens": sum(record.speculative.num_accepted_tokens for record in records),
        }
