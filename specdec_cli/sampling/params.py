"""Sampling parameters of one request."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec_cli.call_checks import checked_fields
from specdec_cli.errors import UsageError
from specdec_cli.recipe.keys import check_ranges
from specdec_cli.recipe.schema import Sampling

MAX_LOGIT_BIAS = 1e9
"""Larger ones would drown float32 logits."""
_SEEDS = 2**63


def random_seed() -> int:
    """A seed drawn at random."""
    return secrets.randbelow(_SEEDS)


def settled_seed(seed: int) -> int:
    """The seed itself, or a random one for a negative number, as vLLM and llama.cpp read -1."""
    return random_seed() if seed < 0 else seed


@checked_fields
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when a sequence ends.

    Args:
        max_new_tokens: most tokens to emit, the stop token included; at least 1.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; None keeps all.
        top_p: keep the smallest set with at least this probability; 1 keeps all.
        min_p: drop tokens below this share of the likeliest one's probability.
        repetition_penalty: divide (or multiply, below zero) the logits of tokens seen in prompt and output.
        presence_penalty: subtract once from logits of tokens in the output.
        frequency_penalty: subtract per occurrence in the output.
        logit_bias: token id to a number added to its logit.
        stop: strings that end the output; none of them is part of the text.
        stop_token_ids: tokens that end the output, beside the model's own end tokens.
        ignore_eos: go on after the model's end tokens.
        min_tokens: end and stop tokens are banned before this many are emitted.
        seed: of every random choice of this request; a negative number draws one, which `seed` then holds.
        index: the request's row (prompt of a file, choice of an HTTP request); part of the noise's key.
        logprobs: number of best alternatives reported beside each emitted token; None reports nothing.
        skip_special_tokens: special tokens (a chat's markers) have no text.

    Raises:
        UsageError: a value out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    seed: int = 0
    index: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Refuse values out of range, each by its name."""
        if self.seed < 0:
            object.__setattr__(self, "seed", settled_seed(self.seed))
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k is out of range: `{self.top_k}`", "it must be at least 1; None keeps all tokens")
        check_ranges(self, Sampling)
        if self.min_tokens > self.max_new_tokens:
            raise UsageError(
                f"min_tokens is `{self.min_tokens}`, above max_new_tokens `{self.max_new_tokens}`",
                "lower min_tokens, or raise max_new_tokens",
            )
        if any(not text for text in self.stop):
            raise UsageError("a stop string must not be empty")
        if any(not abs(bias) <= MAX_LOGIT_BIAS for bias in self.logit_bias.values()):
            raise UsageError(f"logit_bias values must be from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}")
