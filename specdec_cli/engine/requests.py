"""Checks of requests before anything runs: prompts in three forms, and the reasons to refuse one."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specdec_cli.errors import UsageError
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.text.tokenizer import Tokenizer

Prompt = str | list[int] | list[dict[str, str]]


def encode(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a prompt: text, ids as they are, or chat messages by the template.

    Raises:
        UsageError: text or messages without a tokenizer.
    """
    items: Any = prompt
    if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], dict)):
        if tokenizer is None:
            raise UsageError("a prompt of text needs a tokenizer", "give token ids")
        return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(items)
    return [operator.index(token) for token in items]


def text_of(prompt: Prompt, tokens: list[int], tokenizer: Tokenizer | None) -> str | None:
    """A prompt's text: as it was given, else its tokens'; None for token ids without a tokenizer."""
    if isinstance(prompt, str):
        return prompt
    return None if tokenizer is None else tokenizer.decode(tokens)


def check(
    tokens: Sequence[int],
    params: SamplingParams,
    num_tokens: int,
    max_context: int,
    prediction: Sequence[int] = (),
) -> None:
    """Refuse a request that cannot run.

    Args:
        tokens: its prompt.
        params: its sampling parameters.
        num_tokens: V, the real vocabulary.
        max_context: the target's context limit.
        prediction: tokens that its output is expected to follow.

    Raises:
        UsageError: an empty prompt, no room left in the context, a token id that does not exist.
    """
    if not tokens:
        raise UsageError("the prompt is empty", "give at least one token")
    if len(tokens) >= max_context:
        raise UsageError(
            f"the prompt has `{len(tokens)}` tokens, and the target's context is `{max_context}`",
            "shorten the prompt, or raise --max-model-len if it was set",
        )
    for name, ids in (
        ("the prompt", tokens),
        ("the prediction", prediction),
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        wrong = next((token for token in ids if not 0 <= token < num_tokens), None)
        if wrong is not None:
            raise UsageError(f"{name} names token `{wrong}`, and the vocabulary has `{num_tokens}` tokens")


def spread(params: SamplingParams | Sequence[SamplingParams] | None, num: int) -> list[SamplingParams]:
    """Sampling parameters for each of `num` prompts; one set serves all, its noise's index counted up row by row.

    Raises:
        UsageError: another number of sets than of prompts.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [replace(params, index=params.index + i) for i in range(num)]
    if len(params) != num:
        raise UsageError(f"`{len(params)}` sets of sampling parameters for `{num}` prompts")
    return list(params)


def as_many(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Prompts as a list, also where one alone was given: a text, token ids, or chat messages."""
    given: Any = prompts
    is_one = isinstance(given, str) or (
        len(given) > 0 and (isinstance(given[0], dict) or hasattr(given[0], "__index__"))
    )
    return [given] if is_one else given
