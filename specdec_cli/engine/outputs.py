"""Results folded from events: what `generate` returns and what every command reports per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specdec_cli.events import Event, Failed, Finished, FinishReason, SpeculativeCounts, Stepped, TokenLogprob
from specdec_cli.timing import Timing, timing_of

if TYPE_CHECKING:
    from specdec_cli.engine.driver import Driver
    from specdec_cli.sampling.grammar import Grammar
    from specdec_cli.sampling.params import SamplingParams


_MOST_SHOWN = 60  # characters of a text in a `repr`


@dataclass(slots=True, repr=False)
class Output:
    """Result of one prompt.

    Args:
        index: the prompt's place among the prompts, from 0.
        prompt: its text; None where only token ids were given and there is no tokenizer.
        prompt_token_ids: its tokens.
        text: generated text.
        token_ids: generated tokens.
        finish_reason: stop, length or abort; None while it runs, and where it failed.
        stop_reason: the stop string or token that ended it, if one did.
        logprobs: one per generated token, where the sampling parameters ask for them.
        speculative: acceptance counts and rates.
        timing: seconds and tokens per second.
        lossless: False where the verification mode does not preserve the target's distribution.
        error: the error that ended it, if the others went on.
    """

    index: int
    prompt: str | None
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    speculative: SpeculativeCounts = field(default_factory=SpeculativeCounts)
    timing: Timing = field(default_factory=Timing)
    lossless: bool = True
    error: Exception | None = None

    def __repr__(self) -> str:
        """Beginning of the text, number of tokens, acceptance and speed."""
        text = self.text if len(self.text) <= _MOST_SHOWN else self.text[: _MOST_SHOWN - 1] + "…"
        parts = [f"index={self.index}", f"text={text!r}", f"num_tokens={len(self.token_ids)}"]
        parts.append(f"finish_reason={self.finish_reason!r}")
        rate, speed = self.speculative.acceptance_rate, self.timing.decode_tokens_per_second
        parts += [] if rate is None else [f"acceptance_rate={rate:.3f}"]
        parts += [] if speed is None else [f"decode_tokens_per_second={speed:.1f}"]
        return f"Output({', '.join(parts)})"

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        from specdec_cli.engine.output_result import OutputResult

        return OutputResult.of(self)


@dataclass(slots=True)
class _RequestTimes:
    added: float
    first: float | None = None
    last: float | None = None


class Outputs:
    """Folds an engine's events into one Output per request; clocks are read as events arrive."""

    def __init__(self) -> None:
        self.by_id: dict[int, Output] = {}
        self.totals = SpeculativeCounts()
        self._clocks: dict[int, _RequestTimes] = {}

    def add(
        self,
        driver: Driver,
        tokens: list[int],
        text: str | None = None,
        params: SamplingParams | None = None,
        num_speculative_tokens: int | None = None,
        index: int | None = None,
        grammar: Grammar | None = None,
        draft: str | None = None,
        tree: str | None = None,
    ) -> int:
        """Queue a request and collect its events from now on; returns its id.

        Raises:
            UsageError: the engine does not accept it.
        """
        from specdec_cli.verification import rule_of

        sequence_id = driver.add(tokens, params, num_speculative_tokens, grammar=grammar, draft=draft, tree=tree)
        output = Output(len(self.by_id) if index is None else index, text, list(tokens))
        temperature = 0.0 if params is None else params.temperature
        output.lossless = rule_of(driver.engine.options.verify, temperature).is_lossless
        if params is not None and params.logprobs is not None:
            output.logprobs = []
        self.by_id[sequence_id] = output
        self._clocks[sequence_id] = _RequestTimes(perf_counter())
        return sequence_id

    def observe(self, event: Event) -> None:
        """Fold one event."""
        if isinstance(event, Stepped):
            self._observe_step(event)
        elif isinstance(event, Finished) and event.sequence_id in self.by_id:
            self._observe_end(event)
        elif isinstance(event, Failed) and event.sequence_id in self.by_id:
            self.by_id[event.sequence_id].error = event.error

    def finished(self) -> list[Output]:
        """All outputs in the order they were added."""
        return list(self.by_id.values())

    def timing(self) -> Timing:
        """All requests as one: from the first one queued to the last token; its rate counts every decoded token."""
        clocks = [clock for clock in self._clocks.values() if clock.last is not None]
        if not clocks:
            return Timing()
        first = min(clock.first for clock in clocks if clock.first is not None)
        last = max(clock.last for clock in clocks if clock.last is not None)
        begin = min(clock.added for clock in clocks)
        num = sum(max(len(output.token_ids) - 1, 0) for output in self.by_id.values())
        return timing_of(begin, first, last, num)

    def _observe_step(self, event: Stepped) -> None:
        now = perf_counter()
        if not all(emitted.from_prefill for emitted in event.emitted):
            self.totals.add_seconds(event)
        share = 1 / len(event.emitted) if event.emitted else 0.0
        for emitted in event.emitted:
            self.totals.add(emitted)
            output, clock = self.by_id.get(emitted.sequence_id), self._clocks.get(emitted.sequence_id)
            if output is None or clock is None:
                continue
            output.token_ids += emitted.tokens
            output.text += emitted.text
            if output.logprobs is not None:
                output.logprobs += emitted.logprobs
            output.speculative.add(emitted)
            if not emitted.from_prefill:
                output.speculative.add_seconds(event, share)
            clock.first = clock.first or now
            clock.last = now

    def _observe_end(self, event: Finished) -> None:
        output, clock = self.by_id[event.sequence_id], self._clocks[event.sequence_id]
        output.text += event.text
        output.finish_reason, output.stop_reason = event.finish_reason, event.stop_reason
        if clock.first is not None and clock.last is not None:
            output.timing = timing_of(clock.added, clock.first, clock.last, len(output.token_ids) - 1)


@dataclass(frozen=True, slots=True)
class Generated:
    """Progress of `Engine.generate` after a step.

    Args:
        num_finished: prompts with a complete result.
        num_prompts: all prompts.
        num_tokens: tokens generated so far, over all prompts.
    """

    num_finished: int
    num_prompts: int
    num_tokens: int

    @classmethod
    def of(cls, outputs: Outputs) -> Generated:
        """Progress of these outputs."""
        results = outputs.finished()
        num_finished = sum(output.finish_reason is not None for output in results)
        return cls(num_finished, len(results), sum(len(output.token_ids) for output in results))


def first_difference(got: Sequence[int], want: Sequence[int]) -> int | None:
    """Position of the first token at which two outputs differ, the shorter one's end included; None for equal ones."""
    for position, (token, wanted) in enumerate(zip(got, want, strict=False)):
        if token != wanted:
            return position
    return None if len(got) == len(want) else min(len(got), len(want))
