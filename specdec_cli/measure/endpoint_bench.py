"""The benchmark of a server: the workload's prompts, so many at a time, so many times, and what came back when.

One request, whose prompt is no row's, is sent before anything counts. The server's own counters are read after it and
after the last answer, so that their difference is this run's. Workers take the next prompt as soon as their last answer
is complete. The time of a run is that in which at least one request was open: what is done while none is costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from specdec_cli.errors import RunError
from specdec_cli.measure.address import Address
from specdec_cli.measure.answer import Answer
from specdec_cli.measure.counters import Counters, difference, read_settled
from specdec_cli.measure.endpoint import Endpoint
from specdec_cli.measure.prompts import PromptRow
from specdec_cli.measure.refusal import EndpointError
from specdec_cli.measure.workload import task_of
from specdec_cli.proxy import Proxy
from specdec_cli.recipe.schema import Sampling

Figure = Literal["ttft_s", "tpot_s", "itl_s", "latency_s"]
FIGURES: tuple[Figure, ...] = ("ttft_s", "tpot_s", "itl_s", "latency_s")
_WARM_UP = "Before the runners start, they"


@dataclass(frozen=True, slots=True)
class Plan:
    """How a server is asked.

    Args:
        address: where it is.
        key: its API key, or None.
        model: the name to ask for; None takes the first that the server lists.
        model_from: who said so, in words.
        chat: prompts are messages.
        concurrency: requests at a time.
        repeats: how often every prompt is sent.
        timeout_s: longest silence of the server.
    """

    address: Address
    key: str | None = field(default=None, repr=False)
    model: str | None = None
    model_from: str = "/v1/models"
    chat: bool = False
    concurrency: int = 1
    repeats: int = 1
    timeout_s: float = 300.0

    @property
    def path(self) -> str:
        """Where requests go, below the API's address."""
        return "/chat/completions" if self.chat else "/completions"


@dataclass(frozen=True, slots=True)
class Visit:
    """One request and what became of it: an answer, or an error."""

    row: PromptRow
    repeat: int
    answer: Answer | None = None
    error: EndpointError | None = None


@dataclass(frozen=True, slots=True)
class Distribution:
    """A figure over all answers.

    Args:
        median: of all values.
        p95: likewise.
        p99: likewise.
        ci95: of the median, by bootstrap over prompts, their range where they are few; None of one prompt.
        pairs: prompts that it rests on.
        values: how many there are.
    """

    median: float | None
    p95: float | None
    p99: float | None
    ci95: tuple[float, float] | None
    pairs: int
    values: int

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        ends = None if self.ci95 is None else list(self.ci95)
        known = {"median": self.median, "p95": self.p95, "p99": self.p99, "ci95": ends}
        return known | {"pairs": self.pairs, "values": self.values}


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """The request's fields that say how to sample: OpenAI's, and vLLM's extras where they are set.

    Length and temperature are always said, for servers have defaults of their own; a seed where chance is involved.
    """
    given: dict[str, Any] = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
    if sampling.temperature > 0 or sampling.seed:
        given["seed"] = sampling.seed
    neutral = Sampling()
    for name in (
        *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("ignore_eos", "min_tokens"),
    ):
        if getattr(sampling, name) != getattr(neutral, name):
            given[name] = getattr(sampling, name)
    if sampling.logit_bias:
        given["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    lists = {"stop": sampling.stop, "stop_token_ids": sampling.stop_token_ids}
    return given | {name: list(values) for name, values in lists.items() if values}


def request_body(row: PromptRow, model: str, chat: bool, fields: dict[str, Any]) -> dict[str, Any]:
    """What is sent for one prompt; its own length and seed go before the run's."""
    own = {"max_tokens": row.max_new_tokens, "seed": row.seed}
    asked = {"messages": [{"role": "user", "content": row.prompt}]} if chat else {"prompt": row.prompt}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return (
        {"model": model} | asked | fields | {name: value for name, value in own.items() if value is not None} | stream
    )


def warm_up_row(rows: Sequence[PromptRow]) -> PromptRow:
    """A prompt that no row begins with, nor it with a row: a server's cached prefixes are of no use to the rows."""
    text = _WARM_UP
    while any(row.prompt.startswith(text) or text.startswith(row.prompt) for row in rows):
        text = f"{len(text)} {text}"
    return PromptRow(-1, text)


class EndpointBench:
    """A run against a server, and its figures.

    Args:
        plan: how it is asked.
        rows: the prompts.
        sampling: of every request.

    Attributes:
        visits: every request so far, in the order of their ends.
        seconds: how long at least one request was open.
        num_sent_again: requests whose connection broke before the answer began; their times tell of both.
    """

    def __init__(self, plan: Plan, rows: Sequence[PromptRow], sampling: Sampling) -> None:
        self.plan, self.rows = plan, list(rows)
        self.fields = sampling_fields(sampling)
        self.model = plan.model or ""
        self.server: str | None = None
        self.version: str | None = None
        self.proxy: Proxy | None = None
        self.counters = Counters(None, {}, ())
        self.visits: list[Visit] = []
        self.seconds = 0.0
        self.num_sent_again = 0
        self._num_open, self._opened = 0, 0.0
        self._gone: EndpointError | None = None

    @property
    def total(self) -> int:
        """Requests to send."""
        return len(self.rows) * self.plan.repeats

    def run(self, stopped: Callable[[], bool], when_idle: Callable[[], None]) -> None:
        """Measure; what was measured is in `visits`.

        Args:
            stopped: whether to send no more.
            when_idle: called after a request that left no other open, outside of all timing; with several at a time
                that is seldom before the last one's end.

        Raises:
            EndpointError: nothing can be measured: no server, no such model, a key that is refused.
            RunError: the server went away, or no request was answered.
        """
        asyncio.run(self._run(stopped, when_idle))

    async def _run(self, stopped: Callable[[], bool], when_idle: Callable[[], None]) -> None:
        plan = self.plan
        async with Endpoint(plan.address, plan.key, plan.timeout_s, plan.concurrency) as endpoint:
            self.proxy = endpoint.proxy
            await self._introduce(endpoint)
            await endpoint.ask(plan.path, self._body(warm_up_row(self.rows)))
            before = await read_settled(endpoint.text, self.model)
            sent_before = endpoint.num_sent_again
            await self._measure(endpoint, stopped, when_idle)
            self.num_sent_again = endpoint.num_sent_again - sent_before
            self._check_answered()
            after = await read_settled(endpoint.text, self.model) if before is not None else None
        tokens = None if self.num_failed else self.num_tokens()
        self.counters = difference(before, after, tokens)

    def _body(self, row: PromptRow) -> dict[str, Any]:
        return request_body(row, self.model, self.plan.chat, self.fields)

    async def _introduce(self, endpoint: Endpoint) -> None:
        """Learn who is there, and choose the model."""
        offered: list[str] = []
        try:
            offered = await endpoint.models()
        except EndpointError as error:
            if error.is_gone or not self.model:
                raise
        if not self.model:
            if not offered:
                raise RunError("the server lists no model", "name one with --endpoint-model")
            self.model = offered[0]
        self.server, self.version = endpoint.server, await endpoint.version()

    async def _measure(self, endpoint: Endpoint, stopped: Callable[[], bool], when_idle: Callable[[], None]) -> None:
        """Send every prompt as often as planned; ends early when the server is gone."""
        jobs = iter([(row, repeat) for repeat in range(self.plan.repeats) for row in self.rows])
        workers = [self._work(endpoint, jobs, stopped, when_idle) for _ in range(self.plan.concurrency)]
        await asyncio.gather(*workers)

    async def _work(
        self,
        endpoint: Endpoint,
        jobs: Iterator[tuple[PromptRow, int]],
        stopped: Callable[[], bool],
        when_idle: Callable[[], None],
    ) -> None:
        for row, repeat in jobs:
            if stopped() or self._gone is not None:
                return
            body = self._body(row)
            try:
                with self._open():
                    answer = await endpoint.ask(self.plan.path, body)
                visit = Visit(row, repeat, answer)
            except EndpointError as error:
                visit = Visit(row, repeat, error=error)
                self._gone = error if error.is_gone else self._gone
            self.visits.append(visit)
            if not self._num_open:
                when_idle()

    @contextmanager
    def _open(self) -> Iterator[None]:
        """One request: the clock of the run goes on while any is open."""
        if not self._num_open:
            self._opened = perf_counter()
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self.seconds += perf_counter() - self._opened

    def _check_answered(self) -> None:
        """Refuse to report on a server that went away, or that answered nothing."""
        if self._gone is not None:
            after = f"after {self.num_answered} of {self.total} answers"
            raise RunError(f"the server went away {after}: {self._gone.message}", "look into its log")
        if self.visits and not self.num_answered:
            first = next(visit.error for visit in self.visits if visit.error is not None)
            raise RunError(f"none of {len(self.visits)} requests was answered: {first.message}", first.hint)

    @property
    def num_answered(self) -> int:
        """Requests that got a whole answer."""
        return sum(visit.answer is not None for visit in self.visits)

    @property
    def num_failed(self) -> int:
        """Requests that failed."""
        return len(self.visits) - self.num_answered

    def answers(self, task: str | None = None) -> list[tuple[PromptRow, Answer]]:
        """Whole answers, of one task or of all."""
        return [
            (visit.row, visit.answer)
            for visit in self.visits
            if visit.answer is not None and (task is None or task_of(visit.row) == task)
        ]

    def num_tokens(self, task: str | None = None) -> int | None:
        """Output tokens as the server's usage counts them; None where one answer came without a count."""
        counts = [answer.completion_tokens for _, answer in self.answers(task)]
        return None if None in counts else sum(count for count in counts if count is not None)

    @property
    def tasks(self) -> dict[str, int]:
        """Tasks and how many prompts each has; empty where no row names one."""
        if not any(row.category for row in self.rows):
            return {}
        names = [task_of(row) for row in self.rows]
        return {task: names.count(task) for task in dict.fromkeys(names)}

    def distribution(self, figure: Figure, task: str | None = None) -> Distribution:
        """A figure over all answers."""
        import numpy as np

        from specdec_cli.measure.stats import bootstrap_pooled_median

        by_row: dict[int, list[float]] = {}
        for row, answer in self.answers(task):
            by_row.setdefault(row.index, []).extend(_values(answer, figure))
        groups = [np.array(values) for values in by_row.values() if values]
        if not groups:
            return Distribution(None, None, None, None, 0, 0)
        interval = bootstrap_pooled_median(groups)
        values = np.concatenate(groups)
        p95, p99 = (float(one) for one in np.quantile(values, (0.95, 0.99)))
        return Distribution(interval.median, p95, p99, interval.ci95, interval.pairs, len(values))


def _values(answer: Answer, figure: Figure) -> list[float]:
    """What one answer adds to a figure."""
    one: float | None
    if figure == "itl_s":
        return answer.gaps_s
    one = {"ttft_s": answer.ttft_s, "tpot_s": answer.tpot_s, "latency_s": answer.end_s}[figure]
    return [] if one is None else [one]
