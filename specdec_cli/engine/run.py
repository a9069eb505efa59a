"""Decoding prompts to their ends: what `Engine.generate` and `Engine.stream` do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.engine.driver import Driver
from specdec_cli.engine.outputs import Output, Outputs
from specdec_cli.engine.requests import Prompt, as_many, spread, text_of
from specdec_cli.events import Event

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.sampling.params import SamplingParams


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
        found = outputs.finished()
        num_finished = sum(one.finish_reason is not None for one in found)
        return cls(num_finished, len(found), sum(len(one.token_ids) for one in found))


def stream(
    engine: Engine,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    num_speculative_tokens: int | None = None,
) -> Iterator[Event]:
    """Events of decoding prompts together; sequence ids count from the first one's in the prompts' order.

    Raises:
        Exception: the error that ended a request.
    """
    many = as_many(prompts)
    with Driver(engine) as driver:
        for prompt, one in zip(many, spread(params, len(many)), strict=True):
            driver.add(prompt, one, num_speculative_tokens)
        for events in driver.steps():
            yield from events


def generate(
    engine: Engine,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    num_speculative_tokens: int | None = None,
    progress: Callable[[Generated], None] | None = None,
) -> list[Output]:
    """Results of decoding prompts together, in the prompts' order; see `Engine.generate`.

    Raises:
        Exception: the error that ended a request.
    """
    many = as_many(prompts)
    outputs = Outputs()
    with Driver(engine) as driver:
        for prompt, one in zip(many, spread(params, len(many)), strict=True):
            tokens = engine.encode(prompt)
            outputs.add(driver, tokens, text_of(prompt, tokens, engine.tokenizer), one, num_speculative_tokens)
        for events in driver.steps():
            for event in events:
                outputs.observe(event)
            if progress is not None:
                progress(Generated.of(outputs))
    return outputs.finished()
