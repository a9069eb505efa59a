"""Decoding prompts to their ends: what `Engine.generate` and `Engine.stream` do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.engine.outputs import Output, Outputs
from specdec_cli.engine.requests import Prompt, as_many, spread
from specdec_cli.events import Event, Failed

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
        Exception: the one that ended a request.
    """
    many = as_many(prompts)
    ids: list[int] = []
    try:
        for prompt, one in zip(many, spread(params, len(many)), strict=True):
            ids.append(engine.add(prompt, one, num_speculative_tokens))
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, Failed) and event.sequence_id in ids:
                    raise event.error
                yield event
    finally:
        _abandon(engine, ids)


def generate(
    engine: Engine,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    num_speculative_tokens: int | None = None,
    progress: Callable[[Generated], None] | None = None,
) -> list[Output]:
    """Results of decoding prompts together, in the prompts' order; see `Engine.generate`.

    Raises:
        Exception: the one that ended a request.
    """
    many = as_many(prompts)
    outputs = Outputs()
    try:
        for prompt, one in zip(many, spread(params, len(many)), strict=True):
            outputs.add(engine, prompt, one, num_speculative_tokens)
        while engine.has_work:
            for event in engine.step():
                outputs.observe(event)
            if progress is not None:
                progress(Generated.of(outputs))
    finally:
        _abandon(engine, outputs.by_id)
    return outputs.finished()


def _abandon(engine: Engine, ids: Iterable[int]) -> None:
    """Abort what is left of requests whose caller went away; those that finished are none."""
    for sequence_id in list(ids):
        engine.abort(sequence_id)
