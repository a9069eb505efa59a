"""Samples of the target's text, and batches of these with its logits and hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Sample:
    """One text of the target.

    Args:
        tokens: the prompt and the answer; of a conversation, every turn.
        num_prompt_tokens: tokens of the prompt, which the loss leaves out.
        skipped: begin and end of later stretches that it leaves out, such as what the user says between two answers.
    """

    tokens: Sequence[int]
    num_prompt_tokens: int
    skipped: Sequence[tuple[int, int]] = ()

    @classmethod
    def masked(cls, tokens: Sequence[int], is_answer: Sequence[bool]) -> Sample:
        """The sample of a text, from which of its tokens count."""
        begin = list(is_answer).index(True) if any(is_answer) else len(tokens)
        groups = groupby(range(begin, len(tokens)), key=lambda place: is_answer[place])
        skipped = [list(places) for is_own, places in groups if not is_own]
        return cls(tokens, begin, tuple((places[0], places[-1] + 1) for places in skipped))

    @property
    def is_counted(self) -> list[bool]:
        """Whether each token counts in the loss; tokens of answers do."""
        is_counted = [place >= self.num_prompt_tokens for place in range(len(self.tokens))]
        for begin, end in self.skipped:
            is_counted[begin:end] = [False] * len(is_counted[begin:end])
        return is_counted

    @property
    def num_counted(self) -> int:
        """Tokens that count in the loss."""
        return sum(self.is_counted)

    def cut(self, length: int) -> Sample:
        """Sample of the first tokens."""
        return replace(self, tokens=self.tokens[:length])


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Several samples side by side, padded behind their ends, with what the target computes of them.

    Args:
        tokens: [B, N] int64; 0 behind a sample's end.
        is_counted: [B, N] bool, tokens that count when they are predicted: answers, not prompts, not padding.
        features: [B, N, taps, hidden] of the target, taps in the method's order; None for a method without taps.
        logits: [B, N, D] float32 of the target, D the tokens that the draft can draft; those at position t predict the
            token at t + 1, and are wanted where that one counts.
        is_drafted: [B, N] bool, whether the target's most likely token is among these; None where all tokens are.
        seeds: of what is drawn at random in each sample; None draws from torch's own generator.
    """

    tokens: Tensor
    is_counted: Tensor
    features: Tensor | None
    logits: Tensor
    is_drafted: Tensor | None = None
    seeds: Sequence[int] | None = None

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.is_counted.shape, "each token counts or not"

    @property
    def num_counted(self) -> int:
        """Tokens that count."""
        return int(self.is_counted.sum())

    @property
    def answers(self) -> Tensor:
        """[B, N] int64, the number of the answer within its sample that each token belongs to, from 1; 0 for others."""
        before = functional.pad(self.is_counted[:, :-1], (1, 0))
        return (self.is_counted & ~before).cumsum(1) * self.is_counted

    def generator(self, row: int) -> torch.Generator | None:
        """A fresh generator on the CPU for the sample in a row; None is torch's own."""
        return None if self.seeds is None else torch.Generator().manual_seed(self.seeds[row])


def padded(samples: Sequence[Sample], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens [B, N] int64 and which of them count [B, N] bool, N the longest sample's length."""
    longest = max(len(sample.tokens) for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
    is_counted = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.tokens)] = torch.tensor(sample.tokens)
        is_counted[row, : len(sample.tokens)] = torch.tensor(sample.is_counted)
    return tokens.to(device), is_counted.to(device)
