"""The prompts of a training run in the target's tokens, with the answers that they bring where those are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.measure.workload.chats import given_answer, given_chat

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.engine.prompts import PromptRow
    from specdec_cli.recipe.schema import Train
    from specdec_cli.text.tokenizer import Tokenizer
    from specdec_cli.train.samples import Sample
    from specdec_cli.train.session import TrainingData


@dataclass(frozen=True, slots=True)
class PromptReader:
    """The tokens of prompts for a target, without its weights."""

    tokenizer: Tokenizer
    max_context: int
    eos_token_ids: Sequence[int]

    @classmethod
    def of(cls, engine: Engine) -> PromptReader:
        """Reader of prompts for an engine's target."""
        assert engine.tokenizer is not None, "a target that is loaded by name has a tokenizer"
        return cls(engine.tokenizer, engine.target.max_context, engine.eos_token_ids)


def training_data(reader: PromptReader, rows: Sequence[PromptRow], chat: bool, settings: Train) -> TrainingData:
    """The data of a run.

    Args:
        reader: of the target.
        rows: the prompts.
        chat: whether they are conversations.
        settings: the recipe's `train` section.

    Raises:
        UsageError: a row has no answer to keep, its conversation cannot be rendered, or no row fits the context.
    """
    from specdec_cli.engine.requests import encode
    from specdec_cli.train.session import TrainingData

    tokens = [encode(row.chat() if chat else row.prompt, reader.tokenizer) for row in rows]
    samples = None
    if settings.keep_answers:
        pairs = zip(rows, tokens, strict=True)
        samples = [_chats(reader, row) if chat else _text(reader, row, prompt) for row, prompt in pairs]
    return TrainingData.of(tokens, reader.max_context, settings.num_held_out, settings.answers_per_prompt, samples)


def _text(reader: PromptReader, row: PromptRow, prompt: list[int]) -> list[Sample]:
    """A prompt with its answer, which ends with the target's first end token."""
    from specdec_cli.train.samples import Sample

    answer = reader.tokenizer.encode(given_answer(row), add_special_tokens=False)
    return [Sample([*prompt, *answer, *reader.eos_token_ids[:1]], len(prompt))]


def _chats(reader: PromptReader, row: PromptRow) -> list[Sample]:
    """A conversation, of which every answer counts."""
    from specdec_cli.text.answered_chat import answered_chats
    from specdec_cli.train.samples import Sample

    chats = answered_chats(reader.tokenizer, given_chat(row), reader.eos_token_ids)
    return [Sample.masked(answered.tokens, answered.is_answer) for answered in chats]
