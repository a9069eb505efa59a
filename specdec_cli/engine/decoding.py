"""Decoding requests on an engine, group by group, and keeping what came of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdec_cli.engine.driver import Driver, never
from specdec_cli.engine.meter import Meter
from specdec_cli.engine.outputs import Output, Outputs
from specdec_cli.errors import UsageError
from specdec_cli.events import Event, SpeculativeCounts
from specdec_cli.timing import Timing, joined_timing

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.engine.prompts import PromptRow
    from specdec_cli.sampling.grammar import Grammar
    from specdec_cli.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One row's tokens, how they are continued, and what the output must match."""

    row: PromptRow
    token_ids: list[int]
    params: SamplingParams
    grammar: Grammar | None = None


@dataclass(slots=True, eq=False)
class Decoding:
    """One way of decoding requests on an engine, and what it gave.

    Args:
        name: as shown in reports and messages.
        num_speculative_tokens: its k; None takes the engine's.
        passes: results, one for each group of requests that it decoded together.
        meter: counts of its steps, for a screen.
        draft: name of its drafter; None takes the engine's own.
        keeps_errors: whether a request that fails keeps its error and the others go on; else the error is raised.
        tree: shape of its drafted trees, `none` for chains; None takes the engine's.
    """

    name: str
    num_speculative_tokens: int | None = None
    passes: list[Outputs] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)
    draft: str | None = None
    keeps_errors: bool = False
    tree: str | None = None

    def begin(self, driver: Driver, requests: Sequence[Request]) -> None:
        """Queue a group of requests and collect what becomes of them.

        Raises:
            UsageError: a request that the engine refuses, named by its place when there are several.
        """
        outputs = Outputs()
        self.passes.append(outputs)
        for request in requests:
            try:
                outputs.add(
                    driver,
                    request.token_ids,
                    request.row.prompt,
                    request.params,
                    self.num_speculative_tokens,
                    request.row.index,
                    request.grammar,
                    self.draft,
                    self.tree,
                )
            except UsageError as error:
                raise named(error, request, len(requests)) from error

    def observe(self, event: Event) -> None:
        """Fold one event of the pass that runs."""
        self.passes[-1].observe(event)
        self.meter.observe(event)

    def outputs(self) -> list[Output]:
        """Every result so far, in the order of the rows."""
        finished = [output for each in self.passes for output in each.finished()]
        return sorted(finished, key=lambda output: output.index)

    def counts(self) -> SpeculativeCounts:
        """The counts of all its decode steps."""
        return self.meter.counts

    def timing(self) -> Timing:
        """All passes as one: seconds added up, the first token's of the first pass."""
        timings = [each.timing() for each in self.passes]
        timings = [timing for timing in timings if timing.total_s is not None]
        if len(timings) < 2:
            return timings[0] if timings else Timing()
        num = sum(max(len(output.token_ids) - 1, 0) for output in self.outputs())
        return joined_timing(timings, timings[0].ttft_s, num)


Watch = Callable[[Decoding, Event], None]
Stopped = Callable[[], bool]


def unwatched(_decoding: Decoding, _event: Event) -> None:
    """Watch nothing."""


def decode(
    engine: Engine,
    decoding: Decoding,
    requests: Sequence[Request],
    watch: Watch = unwatched,
    stopped: Stopped = never,
) -> None:
    """Decode requests together; when `stopped` turns true, what is unfinished is aborted.

    Args:
        engine: idle.
        decoding: how; it takes the results.
        requests: one group.
        watch: told every event after it is folded.
        stopped: asked between steps.

    Raises:
        Exception: the error that ended a request, unless errors are kept; the others are aborted.
    """
    with Driver(engine, keeps_errors=decoding.keeps_errors) as driver:
        decoding.begin(driver, requests)
        for events in driver.steps(stopped):
            for event in events:
                decoding.observe(event)
                watch(decoding, event)


def named(error: UsageError, request: Request, num_requests: int) -> UsageError:
    """The refusal of a request, with its place where there are several."""
    if num_requests == 1:
        return error
    return UsageError(f"prompt {request.row.index + 1}: {error.message}", error.hint)
