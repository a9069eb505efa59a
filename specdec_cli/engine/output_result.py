"""The JSON form of an output, apart from the engine: a run that writes no document never builds its models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from specdec_cli.document import Count, Result, SpeculativeResult, TimingResult, absent
from specdec_cli.errors import in_words
from specdec_cli.events import IMPOSSIBLE


def _num(tokens: int | Sequence[int]) -> int:
    return tokens if isinstance(tokens, int) else len(tokens)


def _sentence(error: str | Exception | None) -> str | None:
    return in_words(error)[0] if isinstance(error, Exception) else error


Logprob = Annotated[float, BeforeValidator(lambda value: max(value, IMPOSSIBLE))]


class LogprobResult(Result):
    """A token's log-probability, and those of the likeliest tokens in its place."""

    token_id: Count
    logprob: Logprob
    top: list[tuple[Count, Logprob]]


class OutputResult(Result):
    """Result of one prompt."""

    index: Count
    prompt: str | None
    text: str
    token_ids: list[Count]
    prompt_tokens: Annotated[Count, BeforeValidator(_num)] = Field(validation_alias="prompt_token_ids")
    completion_tokens: Annotated[Count, BeforeValidator(_num)] = Field(validation_alias="token_ids")
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: int | str | None
    speculative: SpeculativeResult
    timing: TimingResult
    error: Annotated[str | None, BeforeValidator(_sentence)] = absent("What ended the request; the others went on.")
    logprobs: list[LogprobResult] | None = absent()
    id: str | int | None = absent()
    category: str | None = absent()
    turn: Count | None = absent("Of a conversation, from 1.")
