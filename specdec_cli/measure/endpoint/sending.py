"""Sends the requests of a plan when they are due, at most so many at a time, and keeps the clock of the run.

Without a rate the next prompt is sent as soon as a place is free. The clock of this closed loop runs while at least one
request is open, so that work between requests costs nothing. At a rate prompts arrive at times of their own, whether
the server keeps up or not. The clock of this open loop runs from its start to the last answer. Waiting for a place is
part of a user's wait, so every request is timed from its arrival, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import accumulate
from math import inf
from random import Random
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

from specdec_cli.engine.prompts import PromptRow
from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan, Visit
from specdec_cli.measure.endpoint.refusal import EndpointError
from specdec_cli.measure.workload.turns import Dialogue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_LOOK_SECONDS = 0.25


class Sender:
    """Sends requests to a server.

    Args:
        plan: how many at a time, and when.
        body_of: the request's body for a prompt.
        stopped: whether to send no more.
        when_idle: called after a request that left no other open, outside of a closed loop's timing.

    Attributes:
        visits: every request so far, in the order of their ends.
        seconds: how long at least one request was open; of an open loop the time to the last answer.
        most_open: requests at a time.
        most_waiting: requests that had arrived and waited for a place; 0 where nothing arrives at a time of its own.
        cpu_seconds: what this client computed meanwhile, on the one thread that it has.
        num_unsent: turns that could not be asked, because of the turn before them.
        gone: the error of a server that went away.
    """

    def __init__(
        self,
        plan: EndpointPlan,
        body_of: Callable[[PromptRow], dict[str, Any]],
        stopped: Callable[[], bool],
        when_idle: Callable[[], None],
    ) -> None:
        self.visits: list[Visit] = []
        self.seconds = 0.0
        self.most_open = self.most_waiting = 0
        self.cpu_seconds = 0.0
        self.num_unsent = 0
        self.gone: EndpointError | None = None
        self._plan, self._body_of, self._stopped, self._when_idle = plan, body_of, stopped, when_idle
        self._num_open = self._num_waiting = 0
        self._opened = 0.0
        self._places: asyncio.Semaphore | None = None

    async def send(self, endpoint: Endpoint, rows: Sequence[PromptRow]) -> None:
        """Send every prompt as often as planned; ends early when the server is gone."""
        plan = self._plan
        self._places = None if plan.concurrency is None else asyncio.Semaphore(plan.concurrency)
        jobs = [(row, repeat) for repeat in range(plan.repeats) for row in rows]
        tasks = []
        cpu, start = thread_time(), perf_counter()
        for (row, repeat), due_s in zip(jobs, arrival_times(len(jobs), plan.request_rate, plan.seed), strict=True):
            await self._wait_until(start + due_s)
            if self._is_over():
                break
            tasks.append(asyncio.create_task(self._converse(endpoint, row, repeat, start + due_s)))
        await asyncio.gather(*tasks)
        if plan.has_arrivals:
            self.seconds = perf_counter() - start
        self.cpu_seconds = thread_time() - cpu

    def raise_failure(self) -> None:
        """Raise the error of the first request that failed, if one did."""
        for visit in self.visits:
            if visit.error is not None:
                raise visit.error

    def _is_over(self) -> bool:
        return self.gone is not None or self._stopped()

    async def _wait_until(self, due: float) -> None:
        while (left := due - perf_counter()) > 0 and not self._is_over():
            await asyncio.sleep(min(left, _LOOK_SECONDS))

    async def _converse(self, endpoint: Endpoint, row: PromptRow, repeat: int, arrival: float) -> None:
        """Send one prompt, or every turn of a conversation, once there is a place.

        A turn arrives as soon as the one before it is answered. What follows a turn without an answer, or one that
        waits for a tool's result, cannot be asked.
        """
        async with self._place():
            talk = Dialogue(row, row.index)
            while talk.has_more and not self._is_over():
                visit = await self._ask(endpoint, talk.next(), row, repeat, arrival)
                self.visits.append(visit)
                if not self._num_open:
                    self._when_idle()
                if visit.answer is None or visit.answer.calls_tools:
                    self.num_unsent += talk.num_turns - talk.num_begun
                    return
                talk.answer(visit.answer.text)
                arrival = perf_counter()

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of the slots that the plan's limit leaves, in order of arrival."""
        if self._places is None:
            yield
            return
        if self._plan.has_arrivals and self._places.locked():
            self._num_waiting += 1
            self.most_waiting = max(self.most_waiting, self._num_waiting)
            await self._places.acquire()
            self._num_waiting -= 1
        else:
            await self._places.acquire()
        try:
            yield
        finally:
            self._places.release()

    async def _ask(self, endpoint: Endpoint, turn: PromptRow, row: PromptRow, repeat: int, arrival: float) -> Visit:
        body = self._body_of(turn)
        wait_s = max(0.0, perf_counter() - arrival) if self._plan.has_arrivals else 0.0
        answer, error = None, None
        try:
            with self._open():
                answer = await endpoint.ask(self._plan.path, body)
        except EndpointError as raised:
            error = raised
            self.gone = raised if raised.is_gone else self.gone
        return Visit(row, repeat, turn.turn or 1, body[self._plan.max_tokens_field], wait_s, answer, error)

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Count an open request; the clock of a closed loop runs while any is open."""
        if not self._num_open:
            self._opened = perf_counter()
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open and not self._plan.has_arrivals:
                self.seconds += perf_counter() - self._opened


def arrival_times(num: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start to each of `num` arrivals of a Poisson process, in order.

    Args:
        num: how many.
        rate: arrivals per second; gaps are exponential with mean 1 / rate. At `inf` all arrive at once.
        seed: of the gaps.
    """
    if rate == inf:
        return [0.0] * num
    chance = Random(seed)
    return list(accumulate(chance.expovariate(rate) for _ in range(num)))
