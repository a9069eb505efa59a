"""The meter: folds an engine's events into the numbers that screens and servers pull from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec_cli.events import Event, Failed, Finished, SpeculativeCounts, Stepped


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the time of decode steps went, as shares of one."""

    draft: float
    verify: float
    overhead: float


@dataclass(slots=True)
class Meter:
    """Counts of everything an engine has done so far; it never looks at a clock of its own.

    Args:
        num_running: sequences in the last step.
        num_waiting: sequences that were not admitted to it.
        num_finished: sequences that ended.
        num_tokens: every token that reached an output, first tokens included.
        counts: the decode steps' counts.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_finished: int = 0
    num_tokens: int = 0
    counts: SpeculativeCounts = field(default_factory=SpeculativeCounts)

    def observe(self, event: Event) -> None:
        """Fold one event."""
        if isinstance(event, Finished | Failed):
            self.num_finished += 1
        elif isinstance(event, Stepped):
            self._observe_step(event)

    @property
    def decode_seconds(self) -> float:
        """Seconds spent in decode steps."""
        return self.counts.draft_seconds + self.counts.verify_seconds + self.counts.overhead_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of decode steps over the seconds of decode steps, all sequences together."""
        seconds = self.decode_seconds
        return self.counts.num_emitted_tokens / seconds if seconds > 0 else None

    @property
    def shares(self) -> Shares | None:
        """How decode time divides between draft, verification and the rest."""
        seconds = self.decode_seconds
        if seconds <= 0:
            return None
        counts = self.counts
        return Shares(
            counts.draft_seconds / seconds, counts.verify_seconds / seconds, counts.overhead_seconds / seconds
        )

    def _observe_step(self, event: Stepped) -> None:
        self.num_running, self.num_waiting = event.num_running, event.num_waiting
        decoded = False
        for emitted in event.emitted:
            self.counts.add(emitted)
            self.num_tokens += len(emitted.tokens)
            decoded = decoded or not emitted.from_prefill
        if decoded:
            self.counts.add_seconds(event)
