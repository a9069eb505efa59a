"""The prompts of a training run in the target's tokens, with the answers that they bring where those are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec_cli.measure.workload.given_answers import given_answer, given_chat

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.engine.prompts import PromptRow
    from specdec_cli.recipe.schema import Train
    from specdec_cli.train.samples import Sample
    from specdec_cli.train.session import TrainingData


def training_data(engine: Engine, rows: Sequence[PromptRow], chat: bool, settings: Train) -> TrainingData:
    """The data of a run.

    Args:
        engine: with the target.
        rows: the prompts.
        chat: whether they are conversations.
        settings: the recipe's `train` section.

    Raises:
        UsageError: a row has no answer to keep, its conversation cannot be rendered, or no row fits the context.
    """
    from specdec_cli.train.session import TrainingData

    tokens = [engine.encode(row.chat() if chat else row.prompt) for row in rows]
    given = None
    if settings.keep_answers:
        pairs = zip(rows, tokens, strict=True)
        given = [_chats(engine, row) if chat else _text(engine, row, prompt) for row, prompt in pairs]
    return TrainingData.of(tokens, engine.target.max_context, settings.num_held_out, settings.answers_per_prompt, given)


def _text(engine: Engine, row: PromptRow, prompt: list[int]) -> list[Sample]:
    """A prompt with its answer, which ends with the target's first end token."""
    from specdec_cli.train.samples import Sample

    assert engine.tokenizer is not None, "a target that is loaded by name has a tokenizer"
    answer = engine.tokenizer.encode(given_answer(row), add_special_tokens=False)
    return [Sample([*prompt, *answer, *engine.eos_token_ids[:1]], len(prompt))]


def _chats(engine: Engine, row: PromptRow) -> list[Sample]:
    """A conversation, of which every answer counts."""
    from specdec_cli.text.answered_chat import answered_chats
    from specdec_cli.train.samples import Sample

    assert engine.tokenizer is not None, "a target that is loaded by name has a tokenizer"
    found = answered_chats(engine.tokenizer, given_chat(row), engine.eos_token_ids)
    return [Sample.masked(one.tokens, one.is_answer) for one in found]
