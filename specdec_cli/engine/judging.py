"""What a step's logits decide: each row's verdict, and the tokens that its sequence takes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_cli.drafters.contract import Guesses
from specdec_cli.engine.scheduler import Scheduled
from specdec_cli.engine.sequence import Sequence as Request
from specdec_cli.engine.verify import Verdict, VerifyRow, verify
from specdec_cli.events import Emitted, TokenLogprob
from specdec_cli.sampling.chain import ChainRow, Distribution, distribution

Part = tuple[Scheduled, Guesses]
"""A row of a step, and what was drafted for it."""
Fence = Callable[[Request], AbstractContextManager[None]]
"""Holds an exception within the one request whose own part of a step raised it."""


@dataclass(frozen=True, slots=True)
class _Judged:
    """A row's verdict, with p and the place in it where the row begins."""

    part: Part
    p: Distribution
    first: int
    verdict: Verdict

    def take(self) -> Emitted:
        """Give the sequence its accepted tokens and the target's own one.

        Raises:
            LogitsError: the target had no distribution at a position that the output reached.
        """
        (row, guess), verdict = self.part, self.verdict
        if self.p.broken:
            reached = range(self.first, self.first + verdict.num_accepted + 1)
            for error in (self.p.broken[position] for position in reached if position in self.p.broken):
                raise error
        kept = [*guess.tokens[: verdict.num_accepted], verdict.own]
        return row.sequence.extend(guess.tokens, verdict.num_accepted, verdict.own, self._logprobs(kept))

    def _logprobs(self, kept: Sequence[int]) -> list[TokenLogprob]:
        num = self.part[0].sequence.params.logprobs
        if num is None:
            return []
        return [self.p.logprobs(self.first + i, token, num) for i, token in enumerate(kept)]


@dataclass(frozen=True, slots=True)
class Judge:
    """Turns logits into tokens.

    Args:
        num_tokens: V, the real vocabulary.
        rates: of verification mode synthetic, the chance of each drafted token when all before it stand.
    """

    num_tokens: int
    rates: Sequence[float] = ()

    def decide(self, decided: Sequence[Part], logits: Tensor, fence: Fence) -> tuple[Emitted, ...]:
        """Judge all rows together; where that fails each alone, so that only those end whose own part it is.

        Args:
            decided: rows that get a next token.
            logits: [sum of drafted tokens + 1, V] float32, rows in order.
            fence: stands around what is one request's own.
        """
        if not decided:
            return ()
        try:
            judged = self._judge(decided, logits)
        except Exception:
            judged = list(self._judge_each(decided, logits, fence))
        emitted = []
        for one in judged:
            with fence(one.part[0].sequence):
                emitted.append(one.take())
        return tuple(emitted)

    def _judge_each(self, decided: Sequence[Part], logits: Tensor, fence: Fence) -> Iterator[_Judged]:
        each = torch.split(logits, [len(guess.tokens) + 1 for _, guess in decided])
        for part, its_logits in zip(decided, each, strict=True):
            with fence(part[0].sequence):
                yield from self._judge([part], its_logits)

    def _judge(self, decided: Sequence[Part], logits: Tensor) -> list[_Judged]:
        chain = [
            ChainRow(s.params, s.tokens, s.num_prompt_tokens, guess.tokens, s.stop_ids, row.allowed)
            for s, row, guess in ((row.sequence, row, guess) for row, guess in decided)
        ]
        p = distribution(logits, chain, self.num_tokens)  # a device is waited for here, and has its guesses sent before
        decided = [(row, guess.read()) for row, guess in decided]
        verdicts = verify(
            p,
            [
                VerifyRow(s.verify, s.params, len(s.tokens), guess, self.rates)
                for s, guess in ((row.sequence, guess) for row, guess in decided)
            ],
        )
        judged, first = [], 0
        for part, verdict in zip(decided, verdicts, strict=True):
            judged.append(_Judged(part, p, first, verdict))
            first += len(part[1].tokens) + 1
        return judged
