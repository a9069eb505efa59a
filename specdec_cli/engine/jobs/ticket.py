"""A ticket: the event loop's end of one job, from which its deltas are read as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

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
        self._all_is_here = deltas[-1].is_last
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


class TicketGroup:
    """The tickets of one request, read together: take what is here, and wait for `wake` until all are done.

    Args:
        tickets: read by this group alone.
        min_tokens: fewest tokens of a delta, but for a ticket's last one.
    """

    def __init__(self, tickets: Sequence[Ticket], min_tokens: int = 1) -> None:
        self.wake = asyncio.Event()
        for ticket in tickets:
            ticket.wake = self.wake
        self._unfinished = dict(enumerate(tickets))
        self._min_tokens = min_tokens
        self._short: dict[int, list[Delta]] = {}

    @property
    def is_done(self) -> bool:
        """Whether every ticket's last delta was taken."""
        return not self._unfinished

    def take(self) -> list[Placed]:
        """The deltas that are here, ticket by ticket."""
        self.wake.clear()
        placed: list[Placed] = []
        for place, ticket in list(self._unfinished.items()):
            deltas = ticket.take()
            placed += [(place, delta) for delta in (deltas if self._min_tokens == 1 else self._joined(place, deltas))]
            if ticket.is_done:
                del self._unfinished[place]
        return placed

    def _joined(self, place: int, deltas: Iterable[Delta]) -> Iterator[Delta]:
        for delta in deltas:
            parts = self._short.setdefault(place, [])
            parts.append(delta)
            if delta.is_last or sum(len(part.token_ids) for part in parts) >= self._min_tokens:
                yield merged(self._short.pop(place))


def merged(deltas: Iterable[Delta]) -> Delta:
    """Several deltas of a job as one."""
    parts = list(deltas)
    last = parts[-1]
    return Delta(
        tuple(step for part in parts for step in part.steps),
        "".join(part.rest for part in parts),
        last.finish_reason,
        last.stop_reason,
        last.error,
        parts[0].prompt_logprobs,
    )
