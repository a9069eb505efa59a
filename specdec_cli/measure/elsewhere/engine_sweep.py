"""Every k of another engine from a few of its starts.

The first start decodes without a draft: it gives the target's text, along which the draft is traced, and the time of a
plain step. Two more, at k = 1 and at the largest k, give what drafting costs. From text and costs follows the speed-up
of every k under the engine's own rule; the best few that have not run yet are then measured too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import psutil

from specdec_cli.engine.driver import never
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import RunError
from specdec_cli.measure.elsewhere.engine_pass import measured_pass
from specdec_cli.measure.endpoint.address import ENGINE_OPTION, parse_address
from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan
from specdec_cli.measure.predict.cost import ProfileLoad
from specdec_cli.measure.predict.draft_trace import GuessTrace
from specdec_cli.measure.predict.engine_costs import EngineCosts, EngineRun, PassTotals, fit_costs
from specdec_cli.measure.predict.engine_rules import DRAFTS_PAST_END
from specdec_cli.measure.predict.evidence import Evidence, Recommendation, largest_words, needs, side, times
from specdec_cli.measure.predict.predict import Prediction, predict
from specdec_cli.measure.predict.remote_trace import RemoteTracer
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.rounds import ENOUGH
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.recipe.schema import Sampling

Start = Callable[[int], AbstractContextManager[str]]
Tell = Callable[[str], None]

_TRACED_AT_A_TIME = 8


@dataclass(frozen=True, slots=True)
class EngineSweepPlan:
    """The prompts and sizes of a sweep, and how its requests are sent.

    Args:
        rows: the prompts.
        sampling: of every request.
        chat: whether prompts are messages.
        k_max: largest k.
        batch_sizes: numbers of requests at a time, ascending.
        num_measured: of the best k that have not run, how many are measured.
        rule: of verification, as a trace replays it.
        timeout_s: longest silence of the server.
    """

    rows: Sequence[PromptRow]
    sampling: Sampling
    chat: bool
    k_max: int
    batch_sizes: tuple[int, ...]
    num_measured: int
    rule: str
    timeout_s: float = 300.0


@dataclass(slots=True)
class EngineSize:
    """One batch size: its runs, and what is made of them.

    Args:
        batch_size: requests at a time.
        runs: by k; 0 is without a draft.
        fitted: ks whose runs the costs rest on.
        costs: fitted to these.
        prediction: of every k.
    """

    batch_size: int
    runs: dict[int, EngineRun] = field(default_factory=dict)
    fitted: tuple[int, ...] = ()
    costs: EngineCosts | None = None
    prediction: Prediction | None = None

    def errors(self) -> list[float]:
        """Predicted over measured speed-up, less 1, of every k that was measured."""
        assert self.prediction is not None, "runs are predicted before they are judged"
        plain = self.runs[0]
        return [
            row.speedup.median / run.speedup_over(plain).median - 1
            for row in self.prediction.rows
            if (run := self.runs.get(row.k)) is not None
        ]

    def recommended(self) -> Recommendation:
        """The measured k of the largest speed-up, or none where drafting does not pay."""
        plain = self.runs[0]
        found = {k: run.speedup_over(plain) for k, run in self.runs.items() if k}
        best = max(sorted(found), key=lambda k: found[k].median)
        speedup, length = found[best], self.runs[best].acceptance_length
        said = f"k = {best} gives the largest measured speed-up, {times(speedup)}"
        if side(speedup):
            is_last = self.prediction is not None and best == self.prediction.chains[-1].k
            largest = f"; {largest_words(best)}" if is_last else ""
            return Recommendation(best, speedup, f"{said}, at {length or 1:.2f} tokens a step{largest}", "speculate")
        if all(side(one) is False for one in found.values()):
            return Recommendation(0, None, f"do not speculate: {said}", "do-not-speculate")
        wanted = needs(Evidence(speedup), None, self.batch_size) or ("more prompts (--num-prompts)",)
        return Recommendation(0, speedup, f"{said}, not certainly above 1", "inconclusive", wanted)


class EngineSweep:
    """A sweep, step by step.

    Args:
        start: a server with k drafted tokens, 0 for none, as a context manager that gives its address.
        plan: the prompts and sizes.
        trace_draft: adds the draft to a trace and gives its name.
        tell: takes words about what is going on.
        stopped: whether to stop.
        check: takes the engine's version before anything is measured, and raises where nothing can be predicted.

    Attributes:
        sizes: by batch size.
        trace: the target's text, once it is there.
        draft: the draft's name in it.
        version: of the engine, as it says.
        num_requests: of the trace.
        num_bytes: of these.
        starts: ks in the order of their starts.
    """

    def __init__(
        self,
        start: Start,
        plan: EngineSweepPlan,
        trace_draft: Callable[[Trace], str],
        tell: Tell = lambda _: None,
        stopped: Callable[[], bool] = never,
        check: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        self._start, self.plan, self._trace_draft, self._tell, self._stopped = start, plan, trace_draft, tell, stopped
        self._check = check
        self.sizes = {size: EngineSize(size) for size in plan.batch_sizes}
        self.trace: Trace | None = None
        self.draft = ""
        self.version: str | None = None
        self.num_requests = self.num_bytes = 0
        self.starts: list[int] = []
        self._load_before = psutil.getloadavg()[0]

    def run(self) -> None:
        """Trace, measure, predict, and measure the best few.

        Raises:
            RunError: a server does not start or answer.
            KeyboardInterrupt: it was stopped.
        """
        self._measure(0)
        for k in dict.fromkeys((1, self.plan.k_max)):
            self._measure(k)
        self._predict()
        for k in self._best():
            self._measure(k)

    def _measure(self, k: int) -> None:
        """One start of the engine: every batch size."""
        self.starts.append(k)
        with self._start(k) as url:
            if not k:
                asyncio.run(self._trace(url))
            for size, found in self.sizes.items():
                self._tell(f"measuring {f'k = {k}' if k else 'without a draft'}, {size} at a time")
                load = psutil.getloadavg()[0]
                found.runs[k] = EngineRun(k, tuple(self._round(url, size, at, k) for at in self._rounds(size)), load)
        if not k:
            self._tell("tracing the draft")
            assert self.trace is not None, "the first start traces"
            self.draft = self._trace_draft(self.trace)

    async def _trace(self, url: str) -> None:
        plan = self.plan
        async with Endpoint(parse_address(url, ENGINE_OPTION), None, plan.timeout_s, _TRACED_AT_A_TIME) as target:
            model = await target.choose_model("")
            self.version = await target.version()
            self._check(self.version)
            beyond = plan.k_max if target.owner in DRAFTS_PAST_END else 0
            tracer = RemoteTracer(target, model, plan.rows, plan.sampling, plan.chat, _TRACED_AT_A_TIME, beyond)
            self.trace = await tracer.trace_target(
                lambda done, total: self._tell(f"tracing the target: {done}/{total}")
            )
            self.num_requests, self.num_bytes = target.num_requests, target.num_bytes

    def _rounds(self, size: int) -> list[Sequence[PromptRow]]:
        """The prompts in rounds, each enough for the batch size."""
        rows = self.plan.rows
        num = max(min(ENOUGH, len(rows) // size), 1)
        return [rows[at::num] for at in range(num)]

    def _round(self, url: str, size: int, rows: Sequence[PromptRow], k: int) -> PassTotals:
        if self._stopped():
            raise KeyboardInterrupt
        plan = self.plan
        asked = EndpointPlan(
            parse_address(url, ENGINE_OPTION), chat=plan.chat, concurrency=size, timeout_s=plan.timeout_s
        )
        return measured_pass(asked, plan.sampling, rows, drafts=k > 0)

    def _predict(self) -> None:
        plan, trace = self.plan, self.trace
        assert trace is not None, "the first start traces"
        replays = replay(trace, self.draft, "greedy" if trace.is_greedy else plan.rule, plan.k_max)
        is_lookup = isinstance(trace.draft(self.draft), GuessTrace)
        load = ProfileLoad(self._load_before, psutil.getloadavg()[0], psutil.cpu_count() or 1)
        for size, found in self.sizes.items():
            found.fitted = tuple(k for k in found.runs if k)
            drafting = [found.runs[k] for k in found.fitted]
            found.costs = fit_costs(found.runs[0], drafting, plan.k_max, size, load, is_lookup=is_lookup)
            found.prediction = predict(replays, found.costs.costs)

    def _best(self) -> list[int]:
        """The ks that are predicted fastest at any batch size and have not run, the fastest first."""
        gains: dict[int, float] = {}
        for found in self.sizes.values():
            assert found.prediction is not None, "predicted before"
            for row in found.prediction.rows:
                gains[row.k] = max(gains.get(row.k, 0.0), float(np.nan_to_num(row.speedup.median)))
        ordered = sorted(gains, key=lambda k: (-gains[k], k))[: self.plan.num_measured + len(set(self.starts))]
        return [k for k in ordered if k not in self.starts][: self.plan.num_measured]

    def k_by_batch(self) -> dict[int, int]:
        """The recommended k of every batch size."""
        return {size: found.recommended().k for size, found in self.sizes.items()}

    def median_error(self) -> float:
        """Of predicted speed-ups against all that were measured, sign aside.

        Raises:
            RunError: nothing was measured.
        """
        errors = [abs(one) for found in self.sizes.values() for one in found.errors()]
        if not errors:
            raise RunError("nothing was measured", None)
        return float(np.median(errors))
