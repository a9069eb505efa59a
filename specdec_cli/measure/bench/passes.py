"""Passes of a benchmark's arms over groups of prompts: their seconds, counts and tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

import numpy as np

from specdec_cli.document import DifferencesResult, Interval, PositionResult
from specdec_cli.engine.arms import ArmRun
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.meter import Meter
from specdec_cli.engine.outputs import first_difference
from specdec_cli.events import SpeculativeCounts, Stepped
from specdec_cli.measure.endpoint.server_counts import ServerCounts
from specdec_cli.measure.machine.interruption import INTERRUPTED_SHARE
from specdec_cli.measure.stats import FloatArray, Paired, paired
from specdec_cli.measure.workload.workload import task_of
from specdec_cli.timing import Timing, joined_timing

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
        run: counts and times; its events only until they are counted.
        lost_share: share of its time that other processes cost; None where that is not known.
        num_discarded: interrupted attempts before it.
    """

    group: Group
    repeat: int
    run: ArmRun
    lost_share: float | None = None
    num_discarded: int = 0

    @property
    def turn(self) -> tuple[int, int]:
        """Group and repeat: passes of two arms with the same turn make a pair."""
        return self.group.place, self.repeat

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.run.timing.total_s or 0.0

    @property
    def is_interrupted(self) -> bool:
        """Whether other processes took more than INTERRUPTED_SHARE of its time."""
        return self.lost_share is not None and self.lost_share > INTERRUPTED_SHARE

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(self.run.lengths)

    @property
    def num_decoded_tokens(self) -> int:
        """Tokens after the first ones, which the decode clock measures."""
        return self.num_tokens - self.run.num_first_tokens

    def seconds_per_token(self, kind: Kind) -> float | None:
        """Seconds of a decoded token, or of a token from the request's arrival on; None where there was none."""
        if kind == "decode":
            num, seconds = self.num_decoded_tokens, self.run.timing.decode_s
        else:
            num, seconds = self.num_tokens, self.run.timing.total_s
        return seconds / num if seconds and num > 0 else None


@dataclass(slots=True)
class Track:
    """An arm's passes, their counts and times.

    Args:
        name: the arm's.
        passes: whole ones only.
        task_counts: counts of its steps by task; a step's seconds are shared evenly by the sequences in it.
        server: counts of an arm that is a server; None of others.
    """

    name: str
    passes: list[Pass] = field(default_factory=list)
    task_counts: dict[str, SpeculativeCounts] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)
    num_steps: int = 0
    server: ServerCounts | None = None

    def add(self, pass_: Pass) -> None:
        """Add a pass; its events are counted and dropped."""
        self.passes.append(replace(pass_, run=replace(pass_.run, events=())))
        requests = pass_.group.requests
        if pass_.run.counters is not None:
            self._add_counters(pass_, pass_.run.counters, pass_.run.outcomes)
        for request in requests:
            self.task_counts.setdefault(task_of(request.row), SpeculativeCounts())
        tasks = {place: task_of(request.row) for place, request in zip(pass_.run.sequence_ids, requests, strict=False)}
        for event in pass_.run.events:
            self.meter.observe(event)
            if isinstance(event, Stepped):
                self._add_step(event, tasks)

    def _add_counters(self, pass_: Pass, counters: Mapping[str, int], outcomes: Counter[tuple[int, int]]) -> None:
        """Count a server's pass, for its task too where it has one."""
        self.server = self.server or ServerCounts()
        self.server.add_run(counters, pass_.num_decoded_tokens, outcomes)
        if pass_.group.task:
            of_task = self.task_counts.setdefault(pass_.group.task, ServerCounts())
            assert isinstance(of_task, ServerCounts), "every pass of a server has counters"
            of_task.add_run(counters, pass_.num_decoded_tokens, outcomes)

    def _add_step(self, event: Stepped, tasks: Mapping[int, str]) -> None:
        decoded = [emitted for emitted in event.emitted if not emitted.from_prefill]
        self.num_steps += bool(decoded)
        for emitted in decoded:
            counts = self.task_counts[tasks[emitted.sequence_id]]
            counts.add(emitted)
            counts.add_seconds(event, 1 / len(decoded))

    def timing(self, task: str | None = None) -> Timing:
        """All passes as one: the median time to a first token, other seconds added up."""
        passes = [pass_ for pass_ in self.passes if task in (None, pass_.group.task)]
        firsts = [pass_.run.timing.ttft_s for pass_ in passes if pass_.run.timing.ttft_s is not None]
        if not firsts:
            return Timing()
        num = sum(pass_.num_decoded_tokens for pass_ in passes)
        return joined_timing([pass_.run.timing for pass_ in passes], median(firsts), num)

    def counts(self, task: str | None = None) -> SpeculativeCounts:
        """Counts of speculation over all steps, or over one task's."""
        return (self.server or self.meter.counts) if task is None else self.task_counts[task]

    def seconds_per_token(self, kind: Kind) -> dict[tuple[int, int], float]:
        """Seconds of a token by (group, repeat)."""
        seconds_by_turn = {pass_.turn: pass_.seconds_per_token(kind) for pass_ in self.passes}
        return {key: seconds for key, seconds in seconds_by_turn.items() if seconds is not None}


Compared = tuple[Request, tuple[int, ...], tuple[int, ...]]
"""A request, and its output in two arms."""


def compared_outputs(several: Iterable[Track], plain: Track) -> Iterator[Compared]:
    """Every output of some arms beside the same request's in another; arms that tell no tokens are left out."""
    plain_tokens = {pass_.turn: pass_.run.token_ids for pass_ in plain.passes}
    for pass_ in (pass_ for track in several for pass_ in track.passes):
        tokens, wanted = pass_.run.token_ids, plain_tokens.get(pass_.turn)
        if tokens is not None and wanted is not None:
            yield from zip(pass_.group.requests, tokens, wanted, strict=True)


def differences(compared: Iterable[Compared]) -> DifferencesResult:
    """Outputs compared token by token; null where there are none."""
    num_tokens = num_differing = 0
    first = None
    for request, got, want in compared:
        num_tokens += len(want)
        position = first_difference(got, want)
        if position is not None:
            num_differing += 1
            first = first or PositionResult(index=request.row.index, position=position)
    if not num_tokens:
        return DifferencesResult()
    return DifferencesResult(checked_tokens=num_tokens, mismatches=num_differing, first_divergence=first)


def speeds(fast: Track, slow: Track, kind: Kind, task: str | None = None) -> tuple[FloatArray, FloatArray] | None:
    """Two arms' speeds [pairs], in tokens per second, pair by pair; None where they have no group in common.

    A pair is a group, each arm at the median of its repeats; with a single group its repeats are the pairs.

    Args:
        fast: one arm.
        slow: the other.
        kind: `decode` (after the first token) or `latency` (from arrival to the end).
        task: only this one's groups; there are none where groups hold several.
    """
    a, b = fast.seconds_per_token(kind), slow.seconds_per_token(kind)
    places = {pass_.group.place for pass_ in fast.passes if task in (None, pass_.group.task)}
    both = sorted(key for key in a if key in b and key[0] in places)
    groups = sorted({place for place, _ in both})
    if len(groups) < 2:
        return (np.array([1 / a[key] for key in both]), np.array([1 / b[key] for key in both])) if both else None
    mine, other = (
        np.array([1 / np.median([seconds[key] for key in both if key[0] == place]) for place in groups])
        for seconds in (a, b)
    )
    return mine, other


def against(fast: Track, slow: Track, kind: Kind = "decode", task: str | None = None) -> Paired | None:
    """Speed-up of one arm over another, as `speeds` pairs them."""
    both = speeds(fast, slow, kind, task)
    return None if both is None else paired(*both)


def speedup(fast: Track, slow: Track, kind: Kind = "decode", task: str | None = None) -> Interval | None:
    """Speed-up of one arm over another with its interval, as `speeds` pairs them."""
    pair = against(fast, slow, kind, task)
    return None if pair is None else pair.ratio
