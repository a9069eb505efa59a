"""Sampling parameters of one request."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec_cli.call_checks import checked_fields
from specdec_cli.errors import UsageError

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
        finite = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in finite:
            value = getattr(self, name)
            if not math.isfinite(value):
                raise UsageError(f"{name} must be a finite number, not `{value}`")
        if self.seed < 0:
            object.__setattr__(self, "seed", settled_seed(self.seed))
        ranges = {
            "max_new_tokens": self.max_new_tokens >= 1,
            "temperature": self.temperature >= 0,
            "top_k": self.top_k is None or self.top_k >= 1,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": self.repetition_penalty > 0,
            "min_tokens": self.min_tokens >= 0,
            "seed": 0 <= self.seed < _SEEDS,
            "logprobs": self.logprobs is None or 0 <= self.logprobs <= 100,
        }
        for name, fine in ranges.items():
            if not fine:
                hint = "None keeps all tokens" if name == "top_k" else None
                raise UsageError(f"{name} is out of range: `{getattr(self, name)}`", hint)
        if self.min_tokens > self.max_new_tokens:
            raise UsageError(
                f"min_tokens is `{self.min_tokens}`, above max_new_tokens `{self.max_new_tokens}`",
                "lower min_tokens, or raise max_new_tokens",
            )
        if any(not text for text in self.stop):
            raise UsageError("a stop string must not be empty")
        if any(not abs(bias) <= MAX_LOGIT_BIAS for bias in self.logit_bias.values()):
            raise UsageError(f"logit_bias values must be from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}")
