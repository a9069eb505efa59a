"""The bridge between the event loop and the engine: one thread that owns torch, a bounded queue, deltas handed back.

The thread's loop is: take commands, admit, one step, hand its deltas over. It sleeps while there is nothing to do. What
quick steps gave is turned into deltas when it is handed over, many steps at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from specdec_cli.engine.driver import Driver
from specdec_cli.engine.jobs.outbox import Outbox
from specdec_cli.engine.jobs.records import Delta, Job, JobRecord, Observer
from specdec_cli.engine.jobs.ticket import Ticket
from specdec_cli.engine.scoring import score_prompt
from specdec_cli.errors import QueueFull, Unavailable, UsageError
from specdec_cli.events import Emitted, Event, Failed, Finished, Noticed, Stepped, TokenLogprob
from specdec_cli.sampling.chain import NoTokenLeftError
from specdec_cli.sampling.grammar import GrammarError

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine

OWN_FAULTS = (UsageError, GrammarError, NoTokenLeftError)
"""Errors that a request causes by what it asks for."""

logger = logging.getLogger(__name__)


class Bridge:
    """Runs an engine on a thread of its own.

    Args:
        engine: only the bridge may use it once the bridge has started.
        observers: told on the engine's thread of what happens.
        max_waiting: most jobs that wait beside those that run.
        max_queue_delay_seconds: an idle engine waits up to this long for company before a first step.
        on_death: called on the engine's thread if that ends by an error.
    """

    def __init__(
        self,
        engine: Engine,
        observers: Sequence[Observer] = (),
        *,
        max_waiting: int = 256,
        max_queue_delay_seconds: float = 0.0,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.engine = engine
        self._driver = Driver(engine)
        self.capacity = engine.options.max_num_seqs + max_waiting
        self.death: BaseException | None = None
        self.is_draining = False
        self._observers = tuple(observers)
        self._max_queue_delay_seconds = max_queue_delay_seconds
        self._on_death = on_death
        self._condition = threading.Condition()
        self._arrived: list[Ticket] = []
        self._cancelled: list[Ticket] = []
        self._num_open = 0
        self._is_stopping = False
        self._busy_since: float | None = None
        self._waiting: deque[Ticket] = deque()
        self._running: dict[int, Ticket] = {}
        self._scored: tuple[object, tuple[TokenLogprob, ...]] = (None, ())
        self._outbox = Outbox()
        self._undispatched: list[tuple[float, Sequence[Event]]] = []  # with the moment of their step
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Jobs that wait or run."""
        return self._num_open

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def busy_seconds(self) -> float:
        """How long the thread has been in the present round of its loop; 0 while it sleeps."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def submit(self, job: Job) -> Ticket:
        """Queue one job; see `submit_all`."""
        return self.submit_all([job])[0]

    def submit_all(self, jobs: Sequence[Job]) -> list[Ticket]:
        """Queue jobs, all or none; called on the event loop that will read their tickets.

        Raises:
            QueueFull: they find no place.
            Unavailable: the bridge drains, stops, or its thread ended.
        """
        loop, now = asyncio.get_running_loop(), time.monotonic()
        tickets = [Ticket(job, JobRecord(job.request_id, len(job.token_ids), now), loop, self._cancel) for job in jobs]
        with self._condition:
            self.check_room(len(jobs))
            self._num_open += len(tickets)
            self._arrived += tickets
            self._condition.notify()
        return tickets

    @property
    def is_taking(self) -> bool:
        """Whether it takes jobs at all: it does not drain or stop, and its thread lives."""
        return self.death is None and not (self.is_draining or self._is_stopping)

    def check_room(self, num_jobs: int) -> None:
        """Refuse what `submit_all` would refuse now, before work is done for it.

        Raises:
            QueueFull: so many jobs find no place.
            Unavailable: the bridge drains, stops, or its thread ended.
        """
        if self.death is not None:
            raise _dead()
        if self.is_draining or self._is_stopping:
            raise _stopping()
        if self._num_open + num_jobs > self.capacity:
            raise QueueFull(self._num_open)

    async def drain(self, timeout_seconds: float) -> bool:
        """Take no more jobs and wait for those that are here; whether all of them ended in time."""
        self.is_draining = True
        deadline = time.monotonic() + timeout_seconds
        while self._num_open and self.is_alive and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._num_open

    def stop(self, timeout_seconds: float = 5.0) -> bool:
        """End the thread after its present step; what is left fails. Whether the thread ended in time."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _cancel(self, ticket: Ticket) -> None:
        with self._condition:
            self._cancelled.append(ticket)
            self._condition.notify()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with self.engine.one_thread:
                while self._take_commands():
                    self._admit()
                    if self._running:
                        self._step()
                    if not self._undispatched:
                        self._hand_over()
        except BaseException as caught:
            error = caught
        self._end(error)

    def _take_commands(self) -> bool:
        """Sleep until there is something to do; move arrivals to the queue and end what was cancelled."""
        with self._condition:
            self._sleep()
            if self._is_stopping:
                return False
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
        self._busy_since = time.monotonic()
        for ticket in arrived:
            self._waiting.append(ticket)
            self._observe("queued", len(self._waiting))
        if cancelled:
            self._dispatch_all()
        for ticket in cancelled:
            self._abort(ticket)
        return True

    def _sleep(self) -> None:
        """Wait on the condition, which is held, until a request arrives, and then briefly for more of them."""
        if self._running or self._waiting:
            return
        self._busy_since = None
        while not (self._arrived or self._cancelled or self._is_stopping):
            self._condition.wait()
        deadline = time.monotonic() + self._max_queue_delay_seconds
        while not self._is_stopping and 0 < len(self._arrived) < self.engine.options.max_num_seqs:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._condition.wait(left)

    def _admit(self) -> None:
        """Give the engine what it has places for, turn by turn; in one round one prompt is scored."""
        while (ticket := self._next()) is not None:
            job = ticket.job
            if job.prompt_logprobs is not None and self._running and not self.engine.has_room(len(job.token_ids)):
                return
            self._dispatch_all()
            self._waiting.remove(ticket)
            ticket.record.scheduled = time.monotonic()
            try:
                self._score(ticket)
                if job.decodes:
                    self._running[self._add(job)] = ticket
                else:
                    self._close(ticket, Delta(finish_reason="length"))
            except Exception as error:
                self._close_failed(ticket, error)
            if job.prompt_logprobs is not None:
                return

    def _next(self) -> Ticket | None:
        """The first waiting job of the turn that has the fewest running; None where there is no place for it.

        A turn that has none is let in beyond the places, where another has several: the scheduler makes them share.
        """
        if not self._waiting:
            return None
        counts = Counter(ticket.job.turn for ticket in self._running.values())
        ticket = min(self._waiting, key=lambda ticket: counts[ticket.job.turn])
        has_place = len(self._running) < self.engine.options.max_num_seqs
        may_share = not counts[ticket.job.turn] and max(counts.values(), default=0) > 1
        return ticket if has_place or may_share else None

    def _score(self, ticket: Ticket) -> None:
        """The log-probabilities of its prompt, where they are asked for; once for a request's copies of a prompt."""
        job = ticket.job
        if job.prompt_logprobs is None:
            return
        scored_prompt = (job.request_id, job.token_ids, job.prompt_logprobs)
        if self._scored[0] != scored_prompt:
            self._scored = scored_prompt, tuple(score_prompt(self.engine, job.token_ids, job.prompt_logprobs))
        self._outbox.post(ticket, Delta(prompt_logprobs=self._scored[1]))

    def _add(self, job: Job) -> int:
        return self._driver.add(
            list(job.token_ids),
            job.params,
            job.num_speculative_tokens,
            tree=job.tree,
            draft=job.draft,
            prediction=job.prediction,
            grammar=job.grammar,
            cache_salt=job.cache_salt,
            turn=job.turn,
        )

    def _abort(self, ticket: Ticket) -> None:
        """Cancel a waiting or running job. A job that has ended stays as it is."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            self._close(ticket, Delta(finish_reason="abort"))
            return
        running = next((known for known, running_ticket in self._running.items() if running_ticket is ticket), None)
        if running is not None:
            self._dispatch(self._driver.abort(running), time.monotonic())

    def _step(self) -> None:
        """One step of the engine."""
        events = self._driver.step()
        if events and isinstance(events[0], Failed):
            logger.error("a step of the engine failed and ended the newest request", exc_info=events[0].error)
        self._undispatched.append((time.monotonic(), events))
        if not (self._outbox.may_wait and _is_quick(events)):
            self._dispatch_all()

    def _dispatch_all(self) -> None:
        undispatched, self._undispatched = self._undispatched, []
        for now, events in undispatched:
            self._dispatch(events, now)

    def _dispatch(self, events: Sequence[Event], now: float) -> None:
        """Turn the engine's events of a moment into deltas, records and what observers see."""
        for event in events:
            if isinstance(event, Stepped):
                self._observe("stepped", event, len(self._waiting))
                for emitted in event.emitted:
                    self._emit(emitted, event, 1 / len(event.emitted), now)
            elif isinstance(event, Finished):
                last = Delta(rest=event.text, finish_reason=event.finish_reason, stop_reason=event.stop_reason)
                self._close(self._running.pop(event.sequence_id), last)
            elif isinstance(event, Failed):
                # A forward that failed in the same step may have ended it already.
                ticket = self._running.pop(event.sequence_id, None)
                if ticket is not None:
                    self._close_failed(ticket, event.error)
            elif isinstance(event, Noticed):
                logger.warning(event.message)

    def _emit(self, emitted: Emitted, event: Stepped, share: float, now: float) -> None:
        ticket = self._running[emitted.sequence_id]
        record = ticket.record
        since = None if record.last_token is None else now - record.last_token
        record.first_token = record.first_token or now
        record.last_token = now
        record.num_output_tokens += len(emitted.tokens)
        record.speculative.add(emitted)
        if emitted.from_prefill:
            record.num_cached_tokens = emitted.num_cached_tokens
        else:
            record.speculative.add_seconds(event, share)
        self._outbox.post(ticket, Delta((emitted,)))
        self._observe("emitted", record, len(emitted.tokens), since)

    def _close_failed(self, ticket: Ticket, error: BaseException) -> None:
        """End a job by an error; one that is not the request's own fault is logged whole."""
        if not isinstance(error, OWN_FAULTS):
            extra = {"request_id": ticket.job.request_id}
            logger.error("a request failed", exc_info=error, extra=extra)
        self._close(ticket, Delta(error=error))

    def _close(self, ticket: Ticket, last: Delta) -> None:
        """A job's last delta, joined with what this step gave it."""
        self._outbox.post(ticket, last)
        ticket.record.finished = time.monotonic()
        ticket.record.finish_reason = last.finish_reason
        with self._condition:
            self._num_open -= 1
        self._observe("ended", ticket.record)

    def _hand_over(self) -> None:
        """End a round of the loop; jobs whose readers are gone end too."""
        for ticket in self._outbox.end_round():
            self._abort(ticket)

    def _observe(self, what: str, *facts: Any) -> None:
        """Tell the observers; one that raises is not asked again."""
        for observer in self._observers:
            try:
                getattr(observer, what)(*facts)
            except Exception:
                logger.exception("an observer failed and is left out from now on")
                self._observers = tuple(known for known in self._observers if known is not observer)

    def _end(self, error: BaseException | None) -> None:
        """Fail the remaining jobs when the thread ends, for whatever reason."""
        self._dispatch_all()
        self._busy_since = None
        with self._condition:
            self.death = error
            self._is_stopping = True
            left = [*self._running.values(), *self._waiting, *self._arrived]
            self._arrived = []
        reason = _stopping() if error is None else _dead()
        if error is None:
            self._driver.abort_all()
        for ticket in left:
            self._close(ticket, Delta(error=reason))
        self._running.clear()
        self._waiting.clear()
        self._hand_over()
        if error is not None:
            logger.critical("the engine's thread stopped after an error", exc_info=error)
            if self._on_death is not None:
                self._on_death(error)


def _is_quick(events: Sequence[Event]) -> bool:
    """Whether a step gave tokens that follow others, and nothing else happened."""
    return all(
        isinstance(event, Stepped) and not any(emitted.from_prefill for emitted in event.emitted) for event in events
    )


def _stopping() -> Unavailable:
    return Unavailable("the engine is shutting down", "shutting_down")


def _dead() -> Unavailable:
    return Unavailable("the engine has stopped after an error", "engine_dead")
