"""Arms: ways of decoding the same requests on one engine, with the draft and without it, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from specdec_cli.engine.driver import Driver, never
from specdec_cli.engine.meter import Meter
from specdec_cli.engine.outputs import Output, Outputs, Timing
from specdec_cli.errors import UsageError
from specdec_cli.events import Event, SpeculativeCounts

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.engine.prompts import PromptRow
    from specdec_cli.sampling.grammar import Grammar
    from specdec_cli.sampling.params import SamplingParams

WITHOUT = "without a draft"
"""Name of the plain arm."""
_NUM_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Request:
    """One row's tokens, how they are continued, and what the output must match."""

    row: PromptRow
    token_ids: list[int]
    params: SamplingParams
    grammar: Grammar | None = None


@dataclass(slots=True, eq=False)
class Arm:
    """One way of decoding the requests, and what it gave.

    Args:
        name: what a person calls it.
        num_speculative_tokens: its k; None takes the engine's.
        passes: results, one for each group of requests that it decoded together.
        meter: counts of its steps, for a screen.
        draft: name of its drafter; None takes the engine's own.
        keeps_errors: whether a request that fails keeps its error and the others go on; else the error is raised.
    """

    name: str
    num_speculative_tokens: int | None = None
    passes: list[Outputs] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)
    draft: str | None = None
    keeps_errors: bool = False

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
                )
            except UsageError as error:
                raise _named(error, request, len(requests)) from error

    def observe(self, event: Event) -> None:
        """Fold one event of the pass that runs."""
        self.passes[-1].observe(event)
        self.meter.observe(event)

    def outputs(self) -> list[Output]:
        """Every result so far, in the order of the rows."""
        return sorted((o for one in self.passes for o in one.finished()), key=lambda output: output.index)

    def counts(self) -> SpeculativeCounts:
        """The counts of all its decode steps."""
        return self.meter.counts

    def timing(self) -> Timing:
        """All passes as one: seconds added up, the first token's of the first pass."""
        timings = [one.timing() for one in self.passes]
        timings = [one for one in timings if one.total_s is not None]
        if len(timings) < 2:
            return timings[0] if timings else Timing()
        decode = sum(one.decode_s or 0.0 for one in timings)
        num = sum(max(len(output.token_ids) - 1, 0) for output in self.outputs())
        rate = num / decode if num and decode > 0 else None
        return Timing(timings[0].ttft_s, decode, sum(one.total_s or 0.0 for one in timings), rate)


Watch = Callable[[Arm, Event], None]
Stopped = Callable[[], bool]


def unwatched(_arm: Arm, _event: Event) -> None:
    """Watch nothing."""


def decode(
    engine: Engine,
    arm: Arm,
    requests: Sequence[Request],
    watch: Watch = unwatched,
    stopped: Stopped = never,
) -> None:
    """Decode requests together in one arm; when `stopped` turns true, what is unfinished is aborted.

    Args:
        engine: idle.
        arm: takes the results.
        requests: one group.
        watch: told every event after the arm has folded it.
        stopped: asked between steps.

    Raises:
        Exception: the one that ended a request, unless the arm keeps errors; the others are aborted.
    """
    with Driver(engine, keeps_errors=arm.keeps_errors) as driver:
        arm.begin(driver, requests)
        for events in driver.steps(stopped):
            for event in events:
                arm.observe(event)
                watch(arm, event)


@dataclass(slots=True)
class Comparison:
    """The same requests with a draft and without, group by group, in the order A B B A.

    Args:
        draft: the arm with the draft.
        plain: the arm without.
        tokens_must_agree: whether both arms promise the same tokens (`Rule.keeps_tokens`).
    """

    draft: Arm
    plain: Arm = field(default_factory=lambda: Arm(WITHOUT, 0))
    tokens_must_agree: bool = True

    def run(self, engine: Engine, requests: Sequence[Request], watch: Watch, stopped: Stopped) -> None:
        """Warm both arms up, uncounted, then decode every group in both."""
        _check(engine, requests)
        for arm in (self.draft, self.plain):
            self._warm_up(engine, arm, requests[0], stopped)
        for arm, group in self._turns(requests, engine.options.max_num_seqs):
            if stopped() and arm is self.plain:
                continue
            decode(engine, arm, group, watch, stopped)

    def ratios(self) -> list[float]:
        """Decode speed-up of each group that both arms finished."""
        pairs = zip(self.draft.passes, self.plain.passes, strict=False)
        rates = [
            (a.timing().decode_tokens_per_second, b.timing().decode_tokens_per_second)
            for a, b in pairs
            if _is_whole(a) and _is_whole(b)
        ]
        return [a / b for a, b in rates if a and b]

    def speedup(self) -> float | None:
        """Median of the ratios, or None without one."""
        ratios = self.ratios()
        return median(ratios) if ratios else None

    def differences(self) -> list[tuple[int, int]]:
        """Where tokens differ: (row, position in the output) of each row's first difference."""
        found = []
        for one, other in self._pairs():
            if one.token_ids != other.token_ids:
                agreeing = zip(one.token_ids, other.token_ids, strict=False)
                position = next((i for i, (a, b) in enumerate(agreeing) if a != b), None)
                shorter = min(len(one.token_ids), len(other.token_ids))
                found.append((one.index, shorter if position is None else position))
        return found

    @property
    def num_checked_tokens(self) -> int:
        """Tokens of outputs that both arms finished."""
        return sum(len(plain.token_ids) for _, plain in self._pairs())

    @property
    def equal(self) -> bool | None:
        """Whether both arms gave the same tokens; None where that is not promised or nothing was compared."""
        if not self.tokens_must_agree or not self._pairs():
            return None
        return not self.differences()

    def _pairs(self) -> list[tuple[Output, Output]]:
        plain = {output.index: output for output in self.plain.outputs()}
        pairs = [(output, plain[output.index]) for output in self.draft.outputs() if output.index in plain]
        return [(a, b) for a, b in pairs if _is_complete(a) and _is_complete(b)]

    def _turns(self, requests: Sequence[Request], size: int) -> Iterator[tuple[Arm, Sequence[Request]]]:
        for turn, begin in enumerate(range(0, len(requests), size)):
            arms = (self.draft, self.plain) if turn % 2 == 0 else (self.plain, self.draft)
            for arm in arms:
                yield arm, requests[begin : begin + size]

    def _warm_up(self, engine: Engine, arm: Arm, request: Request, stopped: Stopped) -> None:
        few = min(_NUM_WARM_UP_TOKENS, request.params.max_new_tokens)
        params = replace(request.params, max_new_tokens=few, min_tokens=0)
        uncounted = Arm(arm.name, arm.num_speculative_tokens, keeps_errors=arm.keeps_errors)
        decode(engine, uncounted, [replace(request, params=params)], stopped=stopped)


def _check(engine: Engine, requests: Sequence[Request]) -> None:
    """Refuse a bad request before the first group runs, not in the middle of the comparison."""
    for request in requests:
        try:
            engine.abort(engine.add(request.token_ids, request.params, grammar=request.grammar))
        except UsageError as error:
            raise _named(error, request, len(requests)) from error


def _named(error: UsageError, request: Request, num_requests: int) -> UsageError:
    if num_requests == 1:
        return error
    return UsageError(f"prompt {request.row.index + 1}: {error.message}", error.hint)


def _is_whole(outputs: Outputs) -> bool:
    return all(map(_is_complete, outputs.finished()))


def _is_complete(output: Output) -> bool:
    return output.finish_reason not in (None, "abort")


def as_document(comparison: Comparison) -> dict[str, Any]:
    """The JSON form of a comparison."""
    plain = comparison.plain
    ratios = comparison.ratios()
    return {
        "plain": {"timing": plain.timing().as_dict(), "speculative": plain.counts().as_dict()},
        "speedup": {"decode": {"median": comparison.speedup(), "pairs": len(ratios), "ratios": ratios}},
        "equal": comparison.equal,
    }
