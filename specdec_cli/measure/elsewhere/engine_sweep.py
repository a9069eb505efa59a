"""Every k of another engine from a few of its starts, also with every p-min where the engine has that.

The first start decodes without a draft: it gives the target's text, along which the draft is traced, and the time of a
plain step. Two more, at k = 1 and at the largest k, give what drafting costs, and one with the largest p-min the cost
of a draft pass alone. From text and costs follows the speed-up of every k and p-min under the engine's own rule; the
best few that have not run yet are then measured too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import psutil

from specdec_cli.draft_shape import PLAIN, DraftShape
from specdec_cli.engine.driver import never
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import RunError
from specdec_cli.measure.bench.study import Measured, SizeStudy, Study
from specdec_cli.measure.endpoint.address import ENGINE_OPTION, parse_address
from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm, check_counted
from specdec_cli.measure.endpoint.endpoint_bench import EndpointBench
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan
from specdec_cli.measure.endpoint.request_counts import CountsSource, joint_source
from specdec_cli.measure.endpoint.server_counts import ACCEPTED, DRAFTED, DRAFTS
from specdec_cli.measure.machine.interruption import MachineUsage, look_at_machine
from specdec_cli.measure.machine.load import Load, look_at_load
from specdec_cli.measure.predict.cost import ENOUGH, ProfileLoad
from specdec_cli.measure.predict.draft_trace import GuessTrace
from specdec_cli.measure.predict.engine_costs import EngineCosts, EngineRun, PassTotals, fit_costs
from specdec_cli.measure.predict.engine_rules import DRAFTS_PAST_END
from specdec_cli.measure.predict.predict import Prediction, predict
from specdec_cli.measure.predict.remote_trace import RemoteTracer
from specdec_cli.measure.predict.replay import Replay, replay, replay_unsure
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.measure.predict.traced import Traced
from specdec_cli.recipe.schema import Sampling

Start = Callable[[DraftShape], AbstractContextManager[str]]
Tell = Callable[[str], None]

_TRACED_AT_A_TIME = 8
_SILENCE_SECONDS = 300.0


@dataclass(slots=True, kw_only=True)
class EngineSize(SizeStudy):
    """One batch size: its runs, and the costs fitted to them.

    Args:
        runs: by shape; PLAIN is without a draft.
        fitted: step costs, fitted to the runs of some shapes.
    """

    prediction: Prediction
    runs: Mapping[DraftShape, EngineRun]
    fitted: EngineCosts

    def measured(self) -> dict[DraftShape, Measured]:
        """The measurements so far, the smallest k first."""
        return {
            shape: Measured(shape, run.speedup_over(self.runs[PLAIN]), run.tokens_per_second, run.counts)
            for shape, run in sorted(self.runs.items())
            if shape != PLAIN
        }

    def passes(self) -> list[PassTotals]:
        """Rounds of all starts."""
        return [totals for run in self.runs.values() for totals in run.rounds]

    def notices(self) -> list[str]:
        """Sentences about fitted costs that cannot be right, or are less certain than they seem."""
        return [notice for notice in (self.fitted.doubt, self.costs.warning) if notice is not None]


@dataclass(slots=True, kw_only=True)
class EngineSweep(Study):
    """A study on an engine's starts, step by step; `by_size` and `traced` are there once it was predicted.

    Args:
        start: a server that drafts a shape, PLAIN for none, as a context manager that gives its address.
        rows: the prompts.
        sampling: of every request.
        chat: whether prompts are messages.
        k_max: largest k.
        p_mins: above 0, ascending, that the engine is started with; only a draft with confidences has use for them.
        batch_sizes: numbers of requests at a time, ascending.
        num_measured: of the best shapes that have not run, how many are measured.
        rule: of verification, as a trace replays it.
        trace_draft: adds the draft to a trace and gives its name.
        in_use: the recipe's own k.
        repeats: how often every prompt is sent.
        tell: takes words about what is going on.
        stopped: whether to stop.
        check: takes the engine's version before anything is measured, and raises where nothing can be predicted.
        cpu_seconds: processor time of the server that runs; None where it is not known.
        protocol: asks its server.

    Attributes:
        version: of the engine, as it says.
        num_requests: of the trace.
        num_bytes: of these.
        starts: shapes in the order of their starts.
    """

    start: Start
    rows: Sequence[PromptRow]
    sampling: Sampling
    chat: bool = False
    k_max: int
    p_mins: Sequence[float] = ()
    batch_sizes: tuple[int, ...] = (1,)
    num_measured: int
    rule: str
    trace_draft: Callable[[Trace], str]
    in_use: DraftShape = PLAIN
    repeats: int = 1
    tell: Tell = lambda _: None
    stopped: Callable[[], bool] = never
    check: Callable[[str | None], None] = lambda _: None
    cpu_seconds: Callable[[], float] | None = None
    protocol: type[Endpoint] = Endpoint
    by_size: Sequence[EngineSize] = field(init=False, default=())
    version: str | None = field(init=False, default=None)
    num_requests: int = field(init=False, default=0)
    num_bytes: int = field(init=False, default=0)
    starts: list[DraftShape] = field(init=False, default_factory=list)
    _load_before: Load = field(init=False, default_factory=look_at_load)
    _runs: dict[int, dict[DraftShape, EngineRun]] = field(init=False, default_factory=dict)
    _unsure: Mapping[DraftShape, Replay] = field(init=False, default_factory=dict)

    def run(self) -> None:
        """Trace, measure, predict, and measure the best few.

        Raises:
            RunError: a server does not start or answer.
            KeyboardInterrupt: it was stopped.
        """
        self._runs = {size: {} for size in self.batch_sizes}
        self.traced = traced = self._measure_plain()
        self._unsure = replay_unsure(traced.trace, traced.draft, traced.verify, self.k_max, self.p_mins)
        for shape in dict.fromkeys([DraftShape(1), DraftShape(self.k_max), *sorted(self._unsure)[-1:]]):
            self._measure(shape)
        self.by_size = [self._predict(size, runs) for size, runs in self._runs.items()]
        for shape in self._best():
            self._measure(shape)

    def _measure_plain(self) -> Traced:
        """The start without a draft, which gives the target's text; the draft reads it once the server has ended."""
        self.starts.append(PLAIN)
        with self.start(PLAIN) as url:
            trace = asyncio.run(self._trace(url))
            self._measure_sizes(url, PLAIN)
        self.tell("tracing the draft")
        return Traced(trace, self.trace_draft(trace), self.rule)

    def _measure(self, shape: DraftShape) -> None:
        """One start of the engine: every batch size."""
        self.starts.append(shape)
        with self.start(shape) as url:
            self._measure_sizes(url, shape)

    def _measure_sizes(self, url: str, shape: DraftShape) -> None:
        for size, runs in self._runs.items():
            self.tell(f"measuring {shape if shape.k else 'without a draft'}, {size} at a time")
            load = psutil.getloadavg()[0]
            rounds = tuple(self._round(url, size, rows, shape) for rows in self._rounds(size))
            runs[shape] = EngineRun(shape.k, rounds, load, shape.p_min, self._unsure.get(shape))

    async def _trace(self, url: str) -> Trace:
        address = parse_address(url, ENGINE_OPTION)
        async with self.protocol(address, None, _SILENCE_SECONDS, _TRACED_AT_A_TIME) as target:
            model = await target.choose_model("")
            self.version = await target.version()
            self.check(self.version)
            beyond = self.k_max if target.owner in DRAFTS_PAST_END else 0
            tracer = RemoteTracer(target, model, self.rows, self.sampling, self.chat, _TRACED_AT_A_TIME, beyond)
            trace = await tracer.trace_target(lambda done, total: self.tell(f"tracing the target: {done}/{total}"))
            self.num_requests, self.num_bytes = target.num_requests, target.num_bytes
            return trace

    def _rounds(self, size: int) -> list[Sequence[PromptRow]]:
        """The prompts in rounds, each enough for the batch size."""
        num = max(min(ENOUGH, len(self.rows) // size), 1)
        return [self.rows[place::num] for place in range(num)]

    def _round(self, url: str, size: int, rows: Sequence[PromptRow], shape: DraftShape) -> PassTotals:
        if self.stopped():
            raise KeyboardInterrupt
        plan = EndpointPlan(
            parse_address(url, ENGINE_OPTION),
            chat=self.chat,
            concurrency=size,
            repeats=self.repeats,
            timeout_s=_SILENCE_SECONDS,
            protocol=self.protocol,
        )
        before = self._usage()
        totals, after = (
            measured_pass(plan, self.sampling, rows, drafts=shape.k > 0, may_find_none=shape.p_min > 0),
            self._usage(),
        )
        if before is None or after is None:
            return totals
        return replace(totals, lost_share=after.others_share_since(before))

    def _usage(self) -> MachineUsage | None:
        return None if self.cpu_seconds is None else look_at_machine(self.cpu_seconds())

    def _predict(self, size: int, runs: Mapping[DraftShape, EngineRun]) -> EngineSize:
        traced, before = self.traced, self._load_before
        assert traced is not None, "the first start traces"
        load = ProfileLoad(before.average, psutil.getloadavg()[0], before.num_cores)
        is_lookup = isinstance(traced.trace.draft(traced.draft), GuessTrace)
        drafting = [run for shape, run in runs.items() if shape != PLAIN]
        fitted = fit_costs(runs[PLAIN], drafting, self.k_max, size, load, is_lookup=is_lookup)
        replays = replay(traced.trace, traced.draft, traced.verify, self.k_max)
        return EngineSize(
            batch_size=size,
            k_max=self.k_max,
            costs=fitted.costs,
            prediction=predict(replays, fitted.costs, unsure=self._unsure),
            load=before,
            in_use=self.in_use,
            trusted=inf,  # the costs were fitted to other starts, so a prediction only has to agree
            runs=runs,
            fitted=fitted,
        )

    def _best(self) -> list[DraftShape]:
        """The shapes that are predicted fastest at any batch size and have not run, the fastest first."""
        gains: dict[DraftShape, float] = {}
        for row in (row for at_size in self.by_size for row in at_size.prediction.rows):
            gains[row.shape] = max(gains.get(row.shape, 0.0), float(np.nan_to_num(row.speedup.median)))
        ordered = sorted(gains, key=lambda shape: (-gains[shape], shape))[: self.num_measured + len(set(self.starts))]
        return [shape for shape in ordered if shape not in self.starts][: self.num_measured]

    @property
    def acceptance_from(self) -> CountsSource | None:
        """The source of the measured acceptance."""
        return joint_source(totals.acceptance_from for at_size in self.by_size for totals in at_size.passes())

    def median_error(self) -> float:
        """Median error of predicted speed-ups against all that were measured, sign aside.

        Raises:
            RunError: nothing was measured.
        """
        errors = [
            abs(row.speedup.median / measured[row.shape].speedup.median - 1)
            for at_size in self.by_size
            for measured in [at_size.measured()]
            for row in at_size.prediction.rows
            if row.shape in measured
        ]
        if not errors:
            raise RunError("nothing was measured", None)
        return float(np.median(errors))


def measured_pass(
    plan: EndpointPlan, sampling: Sampling, rows: Sequence[PromptRow], *, drafts: bool, may_find_none: bool = False
) -> PassTotals:
    """Send prompts and count the steps that the engine took for them, by its answers or by its own counters.

    Args:
        plan: where the server is and how it is asked.
        sampling: of every request.
        rows: the prompts.
        drafts: whether it must have drafted.
        may_find_none: whether it may have drafted nothing all the same.

    Raises:
        EndpointError: a request failed.
        RunError: the engine says nothing about its steps, or all answers have one token.
    """
    bench = EndpointBench(EndpointArm(plan, sampling), rows)
    bench.run(never, lambda: None)
    bench.sender.raise_failure()
    seconds, num_tokens = decode_totals([answer for _, answer in bench.answered()])
    if not drafts:
        return PassTotals(seconds, num_tokens)
    counts = bench.counted.counts
    if any(name not in counts for name in (DRAFTS, DRAFTED, ACCEPTED)) or not (counts[DRAFTS] or may_find_none):
        raise RunError("the engine counts no drafted tokens", "check its log, and whether others use it")
    return PassTotals(
        seconds, num_tokens, counts[DRAFTS], counts[DRAFTED], counts[ACCEPTED], acceptance_from=bench.acceptance_from
    )


def decode_totals(answers: Sequence[Answer]) -> tuple[float, int]:
    """Seconds from first to last token and tokens after the first, summed over answers.

    Raises:
        RunError: the server does not count tokens, or no answer has two.
    """
    check_counted(answers)
    seconds, num = 0.0, 0
    for answer in answers:
        if answer.tpot_s is not None and answer.num_tokens is not None:
            seconds += answer.tpot_s * (answer.num_tokens - 1)
            num += answer.num_tokens - 1
    if not num:
        raise RunError("no answer has two tokens, so there is no step to time", "raise -n")
    return seconds, num
