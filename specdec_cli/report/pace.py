"""How long a wait has taken and how long it still takes, in words; and when a plain stream gets its next line."""

from __future__ import annotations

from time import perf_counter

from rich.text import Text

SECONDS_BETWEEN_LINES = 15.0
"""Where no live area can be drawn."""
_BAR_WIDTH = 20


class Pace:
    """Elapsed and remaining time of one piece of work, from when it is made."""

    def __init__(self) -> None:
        self._begin = self._last = perf_counter()

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the work began."""
        return perf_counter() - self._begin

    def is_due(self) -> bool:
        """Whether the next line is due; asking starts the next pause."""
        now = perf_counter()
        if now < self._last + SECONDS_BETWEEN_LINES:
            return False
        self._last = now
        return True

    def words(self, done: float = 0, total: float = 0) -> str:
        """`40 s elapsed, about 2 min left`; without a count only the elapsed time."""
        return f"{duration(self.elapsed_seconds)} elapsed{self.left(done, total)}"

    def left(self, done: float, total: float) -> str:
        """`, about 2 min left`, or nothing where that is not known."""
        if not 0 < done < total:
            return ""
        return f", about {duration(self.elapsed_seconds / done * (total - done))} left"


class Waiting:
    """Phases of a long wait, each with its own remaining time, by the pace since the phase began."""

    def __init__(self) -> None:
        self._pace = self._phase_pace = Pace()
        self._phase, self._done, self._total = "", 0.0, 0.0
        self._done_before = 0.0
        self._is_in_bytes = False

    def __call__(self, phase: str, done: float = 0, total: float = 0, /) -> None:
        """Take the phase that runs now and how much of it is done; a total of 1 counts in per cent."""
        if phase != self._phase:
            self._phase_pace, self._done_before = Pace(), done
        self._phase, self._done, self._total, self._is_in_bytes = phase, done, total, False

    def count_bytes(self, done: float, total: float) -> None:
        """Take how many bytes of the phase are done, which a terminal shows as a bar."""
        if not self._is_in_bytes:
            self._phase_pace, self._done_before = Pace(), 0.0
        self._done, self._total, self._is_in_bytes = done, total, True

    def __rich__(self) -> Text:
        """The words at the time of drawing."""
        if not self._is_in_bytes:
            return Text(self.words(), style="dim")
        full = round(_BAR_WIDTH * self._done / max(self._total, 1))
        return Text.assemble(("━" * full, "cyan"), ("━" * (_BAR_WIDTH - full), "dim"), (f" {self.words()}", "dim"))

    def words(self) -> str:
        """`tracing the target: 3 of 8 (5 s elapsed, about 8 s left)`."""
        phase, done, total = self._phase or "working", self._done, self._total
        count = f": {done:.0%}" if total == 1 else f": {done:.0f} of {total:.0f}" if total else ""
        if self._is_in_bytes:
            prepared = "" if done < total else ", preparing the model"
            count = f": {done / 1e6:.0f} of {total / 1e6:.0f} MB{prepared}"
        left = self._phase_pace.left(done - self._done_before, total - self._done_before)
        return f"{phase}{count} ({self._pace.words()}{left})"


def duration(seconds: float) -> str:
    """`40 s`, `5 min`, `1.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
