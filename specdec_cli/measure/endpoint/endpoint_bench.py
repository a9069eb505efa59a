"""The benchmark of a server: sends the workload's prompts, so many at a time or at a rate, and times the answers.

A warm-up request with a prompt of its own is sent before anything counts. The server's own counters are read after it
and after the last answer, so that their difference is this run's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specdec_cli.document import Count, Ends, Interval, Seconds, SpeculativeResult
from specdec_cli.engine.driver import never
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import RunError
from specdec_cli.measure.endpoint.answer import Answer, own_counts
from specdec_cli.measure.endpoint.counters import Counters, MetricsPage, difference
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm
from specdec_cli.measure.endpoint.endpoint_plan import Visit
from specdec_cli.measure.endpoint.request_counts import AnswerCounts, CountsSource, pooled
from specdec_cli.measure.endpoint.request_fields import warm_up_row
from specdec_cli.measure.endpoint.sending import Sender
from specdec_cli.measure.endpoint.server_counts import ACCEPTED, DRAFTED, DRAFTS
from specdec_cli.measure.stats import bootstrap_pooled_median, ratio_of_totals
from specdec_cli.measure.workload.turns import turn_ends
from specdec_cli.measure.workload.workload import task_of, tasks_of
from specdec_cli.quantities import counted

Figure = Literal["ttft_s", "tpot_s", "itl_s", "latency_s", "queue_s", "arrival_ttft_s", "arrival_latency_s"]
FIGURES: tuple[Figure, ...] = ("ttft_s", "tpot_s", "itl_s", "latency_s")
ARRIVAL_FIGURES: tuple[Figure, ...] = ("queue_s", "arrival_ttft_s", "arrival_latency_s")
"""Of an open loop alone: from a request's arrival, whenever it was sent."""
Answered = Sequence[tuple[Visit, Answer]]
"""Requests with their whole answers."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """A figure over all answers.

    Args:
        median: of all values.
        p95: likewise.
        p99: likewise.
        ci95: of the median, by bootstrap over prompts, their range where they are few; None of one prompt.
        pairs: prompts that it rests on.
        values: how many there are.
    """

    median: Seconds | None
    p95: Seconds | None
    p99: Seconds | None
    ci95: Ends
    pairs: Count
    values: Count


@dataclass(frozen=True, slots=True)
class AnsweredAcceptance:
    """Acceptance by the answers' own counts.

    Args:
        requests: answers that have any.
        rate: accepted over drafted tokens of all of them.
        length: 1 + accepted tokens per step of all of them; unknown without a count of steps.
        speculative: their counts together, and the rates by position.
    """

    requests: Count
    rate: Interval
    length: Interval
    speculative: SpeculativeResult


class EndpointBench:
    """A run against a server, and its figures.

    Args:
        arm: the server, and how it is asked.
        rows: the prompts.

    Attributes:
        sender: what sent the requests, with their clock.
        num_sent_again: requests that found their kept connection closed; their times tell of both.
    """

    def __init__(self, arm: EndpointArm, rows: Sequence[PromptRow]) -> None:
        self.arm, self.plan, self.rows = arm, arm.plan, list(rows)
        self.counters = Counters(None, {}, ())
        self.sender = Sender(self.plan, arm.body, never, lambda: None)
        self.num_sent_again = 0

    @property
    def visits(self) -> list[Visit]:
        """Every request so far, in the order of their ends."""
        return self.sender.visits

    @property
    def seconds(self) -> float:
        """How long the requests took together."""
        return self.sender.seconds

    @property
    def total(self) -> int:
        """Number of requests to send, one for each turn of a conversation."""
        return sum(self.turns.values()) * self.plan.repeats

    @property
    def turns(self) -> dict[int, int]:
        """Number of prompts that have each turn, by turn from 1."""
        lengths = [len(turn_ends(row)) for row in self.rows]
        return {turn: sum(turn <= length for length in lengths) for turn in range(1, max(lengths) + 1)}

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Figures that this run has."""
        return (*FIGURES, *ARRIVAL_FIGURES) if self.plan.has_arrivals else FIGURES

    def run(self, stopped: Callable[[], bool], when_idle: Callable[[], None]) -> None:
        """Measure; what was measured is in `visits`.

        Args:
            stopped: whether to send no more.
            when_idle: called after a request that left no other open, outside of all timing; with several at a time
                that is seldom before the last one's end.

        Raises:
            EndpointError: nothing can be measured: no server, no such model, a key that is refused.
            RunError: the server went away, or no request was answered, or none with any output.
        """
        self.sender = Sender(self.plan, self.arm.body, stopped, when_idle)
        with ExitStack() as started:
            started.callback(self.arm.stop)
            self.arm.start()
            before, after = self._measure()
        tokens = None if self.num_failed else num_tokens(self.answered())
        self.counters = difference(before, after, tokens)

    def _measure(self) -> tuple[MetricsPage | None, MetricsPage | None]:
        """Warm up and send everything; the server's counters before and after it."""
        arm = self.arm
        arm.ask(warm_up_row(self.rows))
        before = arm.page()
        sent_before = arm.num_sent_again
        arm.send(self.sender, self.rows)
        self.num_sent_again = arm.num_sent_again - sent_before
        self._check_answered()
        return before, arm.page() if before is not None else None

    def _check_answered(self) -> None:
        """Refuse to report on a server that went away, or that answered nothing."""
        gone = self.sender.gone
        if gone is not None:
            after = f"after {self.num_answered} of {self.total} answers"
            raise RunError(f"the server went away {after}: {gone.message}", "check its log")
        if self.visits and not self.num_answered:
            first = next(visit.error for visit in self.visits if visit.error is not None)
            raise RunError(f"none of {counted(len(self.visits), 'request')} was answered: {first.message}", first.hint)
        if self.visits and not any(answer.arrivals for _, answer in self.answered()):
            raise RunError(
                f"all of {self.num_answered} answers are empty: there is nothing to time",
                "check the server's answers, and whether it needs --chat",
            )

    @property
    def counted(self) -> AnswerCounts:
        """Counts of all answers: their own if each tells its steps, else the increase of the server's counters."""
        return self.own_counts or self.counters.counted

    @property
    def acceptance_from(self) -> CountsSource | None:
        """The source of `counted`."""
        if self.own_counts is not None:
            return "answers"
        return None if self.counters.page is None else "counters"

    @property
    def own_counts(self) -> AnswerCounts | None:
        """Counts of all answers by their own, or None."""
        return own_counts([answer for _, answer in self.answered()])

    @property
    def num_answered(self) -> int:
        """Requests that got a whole answer."""
        return sum(visit.answer is not None for visit in self.visits)

    @property
    def num_failed(self) -> int:
        """Requests that failed."""
        return len(self.visits) - self.num_answered

    def answered(self, task: str | None = None, turn: int | None = None) -> Answered:
        """Requests with whole answers, of one task or turn or of all."""
        return [
            (visit, visit.answer)
            for visit in self.visits
            if visit.answer is not None
            and (task is None or task_of(visit.row) == task)
            and (turn is None or visit.turn == turn)
        ]

    @property
    def tasks(self) -> dict[str, int]:
        """Number of prompts by task; empty where no row names one."""
        return tasks_of(self.rows)


def num_tokens(answered: Answered) -> int | None:
    """Output tokens as the server's usage counts them; None where one answer came without a count."""
    counts = [answer.num_tokens for _, answer in answered]
    return None if None in counts else sum(count for count in counts if count is not None)


def acceptance(answered: Answered) -> AnsweredAcceptance | None:
    """Acceptance by the answers' own counts, with intervals over prompts; None where no answer has any."""
    counted = [(visit.row.index, answer.speculation) for visit, answer in answered if answer.speculation is not None]
    if not any(own.counts[DRAFTED] for _, own in counted):
        return None
    by_row = {index: np.zeros(3) for index, _ in counted}
    for index, own in counted:
        by_row[index] += (own.counts[ACCEPTED], own.counts[DRAFTED], own.counts.get(DRAFTS, 0))
    accepted, drafted, steps = np.stack(list(by_row.values())).T
    has_steps = all(DRAFTS in own.counts for _, own in counted)
    length = ratio_of_totals(accepted + steps, steps) if has_steps else Interval(float("nan"), None, len(by_row))
    return AnsweredAcceptance(
        len(counted), ratio_of_totals(accepted, drafted), length, pooled([own for _, own in counted])
    )


def percentiles(answered: Answered, figure: Figure) -> Percentiles:
    """A figure over some answers."""
    by_row: dict[int, list[float]] = {}
    for visit, answer in answered:
        by_row.setdefault(visit.row.index, []).extend(_values(visit, answer, figure))
    groups = [np.array(values) for values in by_row.values() if values]
    if not groups:
        return Percentiles(None, None, None, None, 0, 0)
    interval = bootstrap_pooled_median(groups)
    values = np.concatenate(groups)
    p95, p99 = (float(end) for end in np.quantile(values, (0.95, 0.99)))
    return Percentiles(interval.median, p95, p99, interval.ci95, interval.pairs, len(values))


def _values(visit: Visit, answer: Answer, figure: Figure) -> list[float]:
    """The values that one answer adds to a figure."""
    if figure == "itl_s":
        return answer.gaps_s
    value = {
        "ttft_s": answer.ttft_s,
        "tpot_s": answer.tpot_s,
        "latency_s": answer.end_s,
        "queue_s": visit.wait_s,
        "arrival_ttft_s": None if answer.ttft_s is None else visit.wait_s + answer.ttft_s,
        "arrival_latency_s": visit.wait_s + answer.end_s,
    }[figure]
    return [] if value is None else [value]
