"""Passes of a benchmark's arms over groups of prompts: their seconds, counts and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from specdec_cli.engine.arms import Request
from specdec_cli.engine.meter import Meter
from specdec_cli.engine.outputs import Timing
from specdec_cli.events import Event, SpeculativeCounts, Stepped
from specdec_cli.measure.machine.interruption import INTERRUPTED_SHARE
from specdec_cli.measure.workload.workload import task_of

Kind = Literal["decode", "latency"]
"""After the first token, or from a request's arrival to its end."""


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that are decoded together; where they are not all of one task, its name is empty."""

    place: int
    task: str
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """A group, decoded once in one arm.

    Args:
        group: which.
        repeat: counts from 0.
        token_ids: each request's output.
        timing: the group as one.
        num_first_tokens: tokens that were there when the decode clock began.
        events: what an engine of ours said, until they are counted; empty for others.
        sequence_ids: by which the events name the group's requests, in their order; empty for others.
        lost_share: share of its time that other processes cost; None where that is not known.
        num_discarded: interrupted attempts before it.
    """

    group: Group
    repeat: int
    token_ids: tuple[tuple[int, ...], ...]
    timing: Timing
    num_first_tokens: int
    events: tuple[Event, ...] = ()
    sequence_ids: tuple[int, ...] = ()
    lost_share: float | None = None
    num_discarded: int = 0

    @property
    def is_interrupted(self) -> bool:
        """Whether other processes cost it more time than a measurement bears."""
        return self.lost_share is not None and self.lost_share > INTERRUPTED_SHARE

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(map(len, self.token_ids))

    def seconds_per_token(self, kind: Kind) -> float | None:
        """Seconds of a decoded token, or of a token from the request's arrival on; None where there was none."""
        if kind == "decode":
            num, seconds = self.num_tokens - self.num_first_tokens, self.timing.decode_s
        else:
            num, seconds = self.num_tokens, self.timing.total_s
        return seconds / num if seconds and num > 0 else None


@dataclass(slots=True)
class Track:
    """An arm's passes, and what follows from them.

    Args:
        name: the arm's.
        passes: whole ones only.
        task_counts: counts of its steps by task; a step's seconds are shared evenly by the sequences in it.
    """

    name: str
    passes: list[Pass] = field(default_factory=list)
    task_counts: dict[str, SpeculativeCounts] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)
    num_steps: int = 0

    def add(self, one: Pass) -> None:
        """Take a pass; its events are counted and let go."""
        self.passes.append(replace(one, events=()))
        requests = one.group.requests
        for request in requests:
            self.task_counts.setdefault(task_of(request.row), SpeculativeCounts())
        tasks = {place: task_of(request.row) for place, request in zip(one.sequence_ids, requests, strict=False)}
        for event in one.events:
            self.meter.observe(event)
            if isinstance(event, Stepped):
                self._add_step(event, tasks)

    def _add_step(self, event: Stepped, tasks: Mapping[int, str]) -> None:
        decoded = [emitted for emitted in event.emitted if not emitted.from_prefill]
        self.num_steps += bool(decoded)
        for emitted in decoded:
            counts = self.task_counts[tasks[emitted.sequence_id]]
            counts.add(emitted)
            counts.add_seconds(event, 1 / len(decoded))

    def timing(self, task: str | None = None) -> Timing:
        """All passes as one: the median time to a first token, other seconds added up."""
        passes = [one for one in self.passes if task in (None, one.group.task)]
        firsts = [one.timing.ttft_s for one in passes if one.timing.ttft_s is not None]
        if not firsts:
            return Timing()
        decode = sum(one.timing.decode_s or 0.0 for one in passes)
        num = sum(one.num_tokens - one.num_first_tokens for one in passes)
        rate = num / decode if num and decode > 0 else None
        return Timing(median(firsts), decode, sum(one.timing.total_s or 0.0 for one in passes), rate)

    def counts(self, task: str | None = None) -> SpeculativeCounts:
        """Counts of its steps."""
        return self.meter.counts if task is None else self.task_counts[task]

    def seconds_per_token(self, kind: Kind) -> dict[tuple[int, int], float]:
        """By (group, repeat)."""
        found = {(one.group.place, one.repeat): one.seconds_per_token(kind) for one in self.passes}
        return {key: seconds for key, seconds in found.items() if seconds is not None}


@dataclass(slots=True)
class Differences:
    """Outputs compared token by token.

    Args:
        num_tokens: that were compared.
        num_outputs: that differ.
        first: (row, position in the output) of the first difference.
    """

    num_tokens: int = 0
    num_outputs: int = 0
    first: tuple[int, int] | None = None

    def include(self, other: Differences) -> None:
        """Count another comparison's outputs too."""
        self.num_tokens += other.num_tokens
        self.num_outputs += other.num_outputs
        self.first = self.first or other.first

    def add(self, row: int, got: Sequence[int], want: Sequence[int]) -> None:
        """Compare one output."""
        self.num_tokens += len(want)
        if got != want:
            self.num_outputs += 1
            same = next((i for i, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1]), None)
            self.first = self.first or (row, min(len(got), len(want)) if same is None else same)

    def as_dict(self) -> Mapping[str, Any]:
        """The JSON form, without what was promised."""
        first = None if self.first is None else {"index": self.first[0], "position": self.first[1]}
        is_empty = self.num_tokens == 0
        return {
            "checked_tokens": None if is_empty else self.num_tokens,
            "mismatches": None if is_empty else self.num_outputs,
            "first_divergence": first,
        }
