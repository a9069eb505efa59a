"""Deltas from the engine's thread to the event loop, handed over together if steps are quick.

A word to the event loop costs both threads a switch, so quick steps share one: `HAND_OVER_SECONDS`. Deltas that are
not read before the end are kept until then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from specdec_cli.engine.jobs.records import Delta
from specdec_cli.engine.jobs.ticket import Ticket, merged

HAND_OVER_SECONDS = 0.03
"""Steps that follow each other quicker than this hand their deltas over together; first and last ones never wait."""


class Outbox:
    """Deltas by ticket until they are handed over; the engine's thread alone uses it."""

    def __init__(self) -> None:
        self._deltas: dict[Ticket, list[Delta]] = {}
        self._is_urgent = False
        self._handed_over = 0.0

    @property
    def may_wait(self) -> bool:
        """Whether what is not urgent would not be handed over yet."""
        return time.monotonic() - self._handed_over < HAND_OVER_SECONDS

    def post(self, ticket: Ticket, delta: Delta) -> None:
        """Add a delta; one without tokens is joined with its neighbour, unless it is an error."""
        is_first = ticket.record.first_token == ticket.record.last_token
        self._is_urgent |= delta.is_last or (is_first and not ticket.job.whole)
        deltas = self._deltas.setdefault(ticket, [])
        if deltas and delta.error is None and not (delta.steps and deltas[-1].steps):
            delta = merged([deltas.pop(), delta])
        deltas.append(delta)

    def end_round(self) -> list[Ticket]:
        """Give the deltas to the event loops that read them, in one call each, if it is time for that.

        Returns:
            Tickets whose loop is closed: their readers are gone.
        """
        now = time.monotonic()
        if not self._is_urgent and self.may_wait:
            return []
        self._is_urgent, self._handed_over = False, now
        posted, self._deltas = self._deltas, {}
        for ticket in [reader for reader, deltas in posted.items() if reader.job.whole and not deltas[-1].is_last]:
            self._deltas[ticket] = posted.pop(ticket)
        by_loop: dict[asyncio.AbstractEventLoop, dict[Ticket, list[Delta]]] = {}
        for ticket, deltas in posted.items():
            by_loop.setdefault(ticket.loop, {})[ticket] = [merged(deltas)] if ticket.job.whole else deltas
        unread: list[Ticket] = []
        for loop, its_deltas in by_loop.items():
            try:
                loop.call_soon_threadsafe(_receive, its_deltas)
            except RuntimeError:
                unread += its_deltas
        return unread


def _receive(posted: Mapping[Ticket, Sequence[Delta]]) -> None:
    """On the event loop: put each ticket's deltas where its reader looks."""
    for ticket, deltas in posted.items():
        ticket.push(deltas)
