"""Inboxes: callers share an engine's steps, and each reads the events of its own requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from specdec_cli.errors import UsageError
from specdec_cli.events import Event, Failed, Finished, Stepped


class Inbox:
    """Events of one caller's requests, also those of steps that another caller made.

    Attributes:
        open: ids of the requests whose end was not read, in the order they were added.
        unread: the engine's events of the steps that were not read, other callers' among them.
    """

    def __init__(self) -> None:
        self.open: dict[int, None] = {}
        self.unread: deque[Sequence[Event]] = deque()

    def read(self) -> list[Event]:
        """Take the caller's part of the oldest unread step; empty where there is none."""
        if not self.unread:
            return []
        events = [own for event in self.unread.popleft() if (own := self._own(event)) is not None]
        for event in events:
            if isinstance(event, Finished | Failed):
                self.open.pop(event.sequence_id, None)
        return events

    def _own(self, event: Event) -> Event | None:
        """The caller's part of an event; None where it is about another caller's request."""
        if isinstance(event, Stepped):
            own = tuple(emitted for emitted in event.emitted if emitted.sequence_id in self.open)
            return event if len(own) == len(event.emitted) else replace(event, emitted=own)
        return event if event.sequence_id is None or event.sequence_id in self.open else None


class OneThread:
    """A context that one thread is in at a time; another one is refused at once, and does not wait."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Enter, as often as the thread likes.

        Raises:
            UsageError: another thread is here.
        """
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                "another thread is using this engine",
                "call an engine from one thread at a time; AsyncEngine decodes the requests of many tasks together",
            )

    def __exit__(self, *_: object) -> None:
        """Leave."""
        self._lock.release()
