"""An answer while it is decoded: whole or as a stream; a client that goes away ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec_cli.engine.jobs.ticket import Placed, Ticket, in_chunks, together
from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.answer.respond import CompletionAnswer, compact
from specdec_cli.serve.errors import ApiError
from specdec_cli.serve.http.guard import log_facts

Written = TypeVar("Written")

_PING = b": ping\n\n"


class Reply(Response):
    """Sends what an engine decodes for one request.

    Args:
        tickets: of the request's jobs.
        answer: turns their deltas into documents.
        serve: the server's times and intervals.
        streams: whether chunks are sent as they come.
        headers: of the response, beside the usual ones.
        began: when the request was there, by time.monotonic; its time counts from then.
    """

    def __init__(
        self,
        tickets: Sequence[Ticket],
        answer: CompletionAnswer,
        serve: Serve,
        *,
        streams: bool,
        headers: Mapping[str, str],
        began: float,
    ) -> None:
        kind = "text/event-stream; charset=utf-8" if streams else "application/json"
        quiet = {"cache-control": "no-cache", "x-accel-buffering": "no"} if streams else {}
        super().__init__(headers={**headers, **quiet}, media_type=kind)
        del self.headers["content-length"]
        self._tickets = tickets
        self._answer = answer
        self._serve = serve
        self._streams = streams
        self._began = began
        self._has_begun = False
        self._last_sent = 0.0
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer until the response ends, the client disconnects, or the time is up."""
        gone = asyncio.create_task(until_gone(receive))
        work = asyncio.create_task(self._stream(send) if self._streams else self._whole(send))
        try:
            limit = self._serve.request_timeout_seconds
            left = None if limit is None else max(0.0, self._began + limit - time.monotonic())
            await asyncio.wait({gone, work}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif not gone.done():
                await self._give_up(work, send)
        finally:
            for ticket in self._tickets:
                ticket.cancel()
            gone.cancel()
            work.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)
            log_facts(scope, **self._facts())

    async def _whole(self, send: Send) -> None:
        async for batch in together(self._tickets):
            for place, delta in batch:
                self._answer.observe(place, delta)
        body = await self._aside(lambda: compact(self._answer.document()), self._has_logprobs)
        self.headers["content-length"] = str(len(body))
        await self._begin(send)
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        """Headers wait for the first token, or for the first ping, so that an early error still has its status."""
        batches = together(self._tickets)
        if self._serve.stream_interval is not None and self._serve.stream_interval > 1:
            batches = in_chunks(batches, self._serve.stream_interval)
        first = asyncio.ensure_future(anext(batches, None))
        pings: asyncio.Task[None] | None = None
        try:
            await asyncio.wait({first}, timeout=self._serve.ping_interval_seconds)
            if first.done() and (early := first.result()) is not None and (error := early[0][1].error) is not None:
                raise self._answer.refusal(error)
            await self._begin(send)
            pings = asyncio.create_task(self._ping(send))
            await self._send_chunks(send, first, batches)
        finally:
            first.cancel()
            if pings is not None:
                pings.cancel()

    async def _send_chunks(
        self,
        send: Send,
        first: asyncio.Future[list[Placed] | None],
        batches: AsyncIterator[list[Placed]],
    ) -> None:
        """Write all parts that are ready at once."""
        parts: list[bytes] = []
        try:
            parts += map(self._answer.event, self._answer.opening())
            batch = await first
            while batch is not None:
                is_long = any(delta.prompt_logprobs for _, delta in batch)
                await self._aside(partial(self._write, batch, parts), is_long)
                if not self._answer.is_done:
                    await self._say(send, b"".join(parts))
                    parts.clear()
                batch = await anext(batches, None)
            parts += map(self._answer.event, self._answer.closing())
        except ApiError as error:
            parts.append(self._answer.failure(error))
        last = b"".join(parts)
        await self._say(send, last + self._answer.end, is_last=True)

    def _write(self, batch: Sequence[Placed], parts: list[bytes]) -> None:
        """Chunks of deltas, up to one that carries an error."""
        for place, delta in batch:
            parts += map(self._answer.event, self._answer.chunks(place, delta))

    @property
    def _has_logprobs(self) -> bool:
        jobs = (ticket.job for ticket in self._tickets)
        return any(job.prompt_logprobs is not None or job.params.logprobs is not None for job in jobs)

    async def _aside(self, write: Callable[[], Written], is_long: bool) -> Written:
        """The text to write. Formatting many log-probabilities takes a while, so it does not run on the event loop."""
        return await asyncio.to_thread(write) if is_long else write()

    async def _begin(self, send: Send) -> None:
        self._has_begun = True
        self._last_sent = time.monotonic()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _say(self, send: Send, data: bytes, is_last: bool = False) -> None:
        if data:
            async with self._lock:
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            self._last_sent = time.monotonic()

    async def _ping(self, send: Send) -> None:
        """A comment line whenever nothing was sent for a while."""
        interval = self._serve.ping_interval_seconds
        while True:
            await asyncio.sleep(max(self._last_sent + interval - time.monotonic(), 0.001))
            if time.monotonic() - self._last_sent >= interval:
                await self._say(send, _PING)

    async def _give_up(self, work: asyncio.Task[None], send: Send) -> None:
        """Say that the time is up, in the way that is still open."""
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        limit = self._serve.request_timeout_seconds
        error = ApiError(504, f"the answer took longer than `{limit:g}` seconds", code="timeout")
        if not self._has_begun:
            raise error
        if self._streams and not self._lock.locked():
            last = asyncio.create_task(self._say(send, self._answer.failure(error) + self._answer.end, is_last=True))
            await asyncio.wait({last}, timeout=1.0)
            last.cancel()

    def _facts(self) -> dict[str, int]:
        records = [ticket.record for ticket in self._tickets]
        return {
            "prompt_tokens": sum(record.num_prompt_tokens for record in records),
            "completion_tokens": sum(record.num_output_tokens for record in records),
            "accepted_tokens": sum(record.speculative.num_accepted_tokens for record in records),
        }


async def until_gone(receive: Receive) -> None:
    """Wait until a client whose body was read disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
