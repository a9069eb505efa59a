"""A ticket: the event loop's end of one job, from which its deltas are read as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from specdec_cli.engine.jobs.records import Delta, Job, JobRecord

MAX_BEHIND = 64
"""Deltas that a slow reader has left when others come; where there are so many, they are merged into one."""


class Ticket:
    """One job's deltas in order, the last of which has a finish reason or an error.

    It belongs to the event loop on which it was made; only the loop's thread touches it.

    Args:
        job: what it was given for.
        record: the job's life in numbers, written by the engine's thread.
        loop: the event loop that reads it.
        cancel: tells the bridge to cancel the job.
    """

    def __init__(
        self, job: Job, record: JobRecord, loop: asyncio.AbstractEventLoop, cancel: Callable[[Ticket], None]
    ) -> None:
        self.job = job
        self.record = record
        self.loop = loop
        self.wake = asyncio.Event()
        self._cancel = cancel
        self._pending: deque[Delta] = deque()
        self._all_is_here = False

    @property
    def is_done(self) -> bool:
        """Whether its last delta was taken."""
        return self._all_is_here and not self._pending

    def push(self, deltas: Sequence[Delta]) -> None:
        """Receive the next deltas, one at least; what a reader who is far behind has left becomes one."""
        assert not self._all_is_here, "nothing follows a job's last delta"
        if len(self._pending) >= MAX_BEHIND:
            self._pending = deque([merged(self._pending)])
        self._pending += deltas
        self._all_is_here = is_last(deltas[-1])
        self.wake.set()

    def take(self) -> Sequence[Delta]:
        """The deltas that are here."""
        taken, self._pending = self._pending, deque()
        return taken

    def cancel(self) -> None:
        """Give the job up; its blocks are free within a step. A job that ended is left as it is."""
        if not self._all_is_here:
            self._cancel(self)

    def __aiter__(self) -> Ticket:
        return self

    async def __anext__(self) -> Delta:
        """Wait for the next delta."""
        while not self._pending:
            if self._all_is_here:
                raise StopAsyncIteration
            self.wake.clear()
            await self.wake.wait()
        return self._pending.popleft()


Placed = tuple[int, Delta]
"""A delta with the place of its ticket."""


async def together(tickets: Sequence[Ticket]) -> AsyncIterator[list[Placed]]:
    """The deltas of several tickets as they arrive, all available ones together; ends with the last of them."""
    wake = asyncio.Event()
    for ticket in tickets:
        ticket.wake = wake
    unfinished = dict(enumerate(tickets))
    while unfinished:
        wake.clear()
        found: list[Placed] = []
        for place, ticket in list(unfinished.items()):
            found += [(place, delta) for delta in ticket.take()]
            if ticket.is_done:
                del unfinished[place]
        if found:
            yield found
        elif unfinished:
            await wake.wait()


async def in_chunks(batches: AsyncIterator[list[Placed]], num_tokens: int) -> AsyncIterator[list[Placed]]:
    """The same deltas with at least so many tokens in each, but for a place's last one."""
    held: dict[int, list[Delta]] = {}
    async for batch in batches:
        found: list[Placed] = []
        for place, delta in batch:
            parts = held.setdefault(place, [])
            parts.append(delta)
            if is_last(delta) or sum(len(part.token_ids) for part in parts) >= num_tokens:
                found.append((place, merged(held.pop(place))))
        if found:
            yield found


def is_last(delta: Delta) -> bool:
    """Whether nothing follows."""
    return delta.finish_reason is not None or delta.error is not None


def merged(deltas: Iterable[Delta]) -> Delta:
    """Several steps as one delta; `steps` says what each of them gave."""
    parts = list(deltas)
    last = parts[-1]
    return Delta(
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        num_drafted=sum(part.num_drafted for part in parts),
        num_accepted=sum(part.num_accepted for part in parts),
        logprobs=tuple(one for part in parts for one in part.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        prompt_logprobs=parts[0].prompt_logprobs,
        num_cached_tokens=next((part.num_cached_tokens for part in parts if part.num_cached_tokens is not None), None),
        steps=tuple(counts for part in parts for counts in part.counts),
        num_nodes=sum(part.num_nodes for part in parts),
        ranks=tuple(pair for part in parts for pair in part.ranks),
    )
