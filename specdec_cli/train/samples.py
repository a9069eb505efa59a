"""Samples of the target's text, and batches of these with its logits and hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sample:
    """One text of the target.

    Args:
        tokens: the prompt and the answer.
        num_prompt_tokens: tokens of the prompt, which the loss leaves out.
    """

    tokens: Sequence[int]
    num_prompt_tokens: int

    @property
    def num_counted(self) -> int:
        """Tokens that count in the loss: those of the answer."""
        return len(self.tokens) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Several samples side by side, padded behind their ends, with what the target computes of them.

    Args:
        tokens: [B, N] int64; 0 behind a sample's end.
        is_counted: [B, N] bool, tokens that count when they are predicted: answers, not prompts, not padding.
        features: [B, N, taps, hidden] of the target, taps in the method's order; None for a method without taps.
        logits: [B, N, V] float32 of the target; those at position t predict the token at t + 1.
    """

    tokens: Tensor
    is_counted: Tensor
    features: Tensor | None
    logits: Tensor

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.is_counted.shape, "each token counts or not"

    @property
    def num_counted(self) -> int:
        """Tokens that count."""
        return int(self.is_counted.sum())


def padded(samples: Sequence[Sample], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens [B, N] int64 and which of them count [B, N] bool, N the longest sample's length."""
    longest = max(len(one.tokens) for one in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
    is_counted = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, one in enumerate(samples):
        tokens[row, : len(one.tokens)] = torch.tensor(one.tokens)
        is_counted[row, one.num_prompt_tokens : len(one.tokens)] = True
    return tokens.to(device), is_counted.to(device)
