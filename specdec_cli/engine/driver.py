"""The driver: the one loop around `Engine.step`, and what becomes of a request that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

from specdec_cli.engine.inbox import Inbox
from specdec_cli.events import Event, Failed

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.engine.requests import Prompt
    from specdec_cli.sampling.params import SamplingParams


def never() -> bool:
    """Answer of a caller who does not stop early."""
    return False


class Driver:
    """Decodes one caller's requests; as a context manager it aborts those that are still open at the end.

    Args:
        engine: decodes them; it may hold other callers' requests, too, whose events go to them.
        keeps_errors: whether the others go on where one of the requests fails.
    """

    def __init__(self, engine: Engine, *, keeps_errors: bool = False) -> None:
        self.engine, self._keeps_errors = engine, keeps_errors
        self._inbox = Inbox()

    @property
    def open(self) -> dict[int, None]:
        """Ids of the caller's requests that have not ended, in the order they were added."""
        return self._inbox.open

    def __enter__(self) -> Self:
        """Take requests."""
        return self

    def __exit__(self, *_: object) -> None:
        """Abort what the caller leaves unfinished."""
        self.abort_all()

    def add(self, prompt: Prompt, params: SamplingParams | None = None, k: int | None = None, **others: Any) -> int:
        """Queue a request as `Engine.add` does, and return its id.

        Args:
            prompt: text, token ids, or chat messages.
            params: its sampling parameters.
            k: its own num_speculative_tokens; None takes the engine's.
            others: further arguments of `Engine.add`.

        Raises:
            UsageError: the engine does not accept it.
        """
        sequence_id = self.engine.add(prompt, params, k, **others)
        self.engine.deliver(sequence_id, self._inbox)
        return sequence_id

    def abort(self, sequence_id: int) -> list[Event]:
        """End a request now; an unknown or finished id gives no event."""
        self.open.pop(sequence_id, None)
        return self.engine.abort(sequence_id)

    def abort_all(self) -> list[Event]:
        """End every open request now."""
        return [event for sequence_id in list(self.open) for event in self.abort(sequence_id)]

    def step(self) -> list[Event]:
        """Run one step of the engine, and return the events of the caller's requests; see `Engine.step_for`.

        An error that the engine cannot attribute to a request fails the newest running one; the others go on.

        Raises:
            Exception: such an error, where the newest running request is another caller's.
        """
        try:
            return self.engine.step_for(self._inbox)
        except Exception as error:
            blamed = self._newest()
            if blamed is None:
                raise
            self.abort(blamed)
            return [Failed(blamed, error)]

    def steps(self, stopped: Callable[[], bool] = never) -> Iterator[list[Event]]:
        """Events of one step after another, until the caller's requests have ended; others may be added between steps.

        Args:
            stopped: asked before each step; once it is true, what is open is aborted, and that was the last.

        Raises:
            Exception: the error that ended one of the caller's requests, after the events before it, unless errors are
                kept; the requests' `Failed` events then have them.
        """
        while self.open:
            if stopped():
                yield self.abort_all()
                return
            events = self.step()
            failed = next((event for event in events if isinstance(event, Failed)), None)
            if failed is None or self._keeps_errors:
                yield events
            else:
                yield events[: events.index(failed)]
                raise failed.error

    def _newest(self) -> int | None:
        """The caller's request that a broken step is attributed to; None where it is another caller's."""
        newest = self.engine.newest_running
        if newest is None:
            return max(self.open, default=None)
        return newest if newest in self.open else None
