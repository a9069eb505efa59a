"""Judges a step's logits: each row's verdict, and the tokens that its sequence takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_cli.drafters.contract import Guesses
from specdec_cli.engine.group import Verdict, VerifyRow
from specdec_cli.engine.scheduler import Scheduled
from specdec_cli.engine.sequence import Sequence as Request
from specdec_cli.engine.verify import verify
from specdec_cli.events import Emitted, TokenLogprob
from specdec_cli.sampling.chain import ChainRow, Distribution, distribution

Part = tuple[Scheduled, Guesses]
"""A row of a step, and what was drafted for it."""
Fence = Callable[[Request], AbstractContextManager[None]]
"""Holds an exception within the one request whose own part of a step raised it."""


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """The verdict on a row.

    Args:
        part: the row, and what was verified for it.
        p: of all rows judged with it.
        first: place in p where the row begins.
        verdict: what stands.
    """

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
            for error in (self.p.broken[place] for place in self._places() if place in self.p.broken):
                raise error
        return row.sequence.extend(guess.drafted, verdict.path, verdict.own, self._logprobs())

    def _places(self) -> list[int]:
        """Where in p the accepted tokens and the own one were decided."""
        return [self.first, *(self.first + node + 1 for node in self.verdict.path)]

    def _logprobs(self) -> list[TokenLogprob]:
        num = self.part[0].sequence.params.logprobs
        if num is None:
            return []
        tokens = self.part[1].drafted.tokens
        kept = [*(tokens[node] for node in self.verdict.path), self.verdict.own]
        return [self.p.logprobs(place, token, num) for place, token in zip(self._places(), kept, strict=True)]


@dataclass(frozen=True, slots=True)
class Judge:
    """Turns logits into tokens.

    Args:
        num_tokens: V, the real vocabulary.
        rates: of verification mode synthetic, the chance of each drafted token when all before it stand.
    """

    num_tokens: int
    rates: Sequence[float] = ()

    def judge(self, decided: Sequence[Part], logits: Tensor, fence: Fence) -> list[JudgedRow]:
        """Judge all rows together; where that fails each alone, so that only those end whose own part it is.

        Args:
            decided: rows that get a next token.
            logits: [sum of drafted tokens + 1, V] float32, rows in order.
            fence: stands around what is one request's own.
        """
        if not decided:
            return []
        try:
            return self._judge(decided, logits)
        except Exception:
            return list(self._judge_each(decided, logits, fence))

    def _judge_each(self, decided: Sequence[Part], logits: Tensor, fence: Fence) -> Iterator[JudgedRow]:
        each = torch.split(logits, [len(guess.drafted) + 1 for _, guess in decided])
        for part, its_logits in zip(decided, each, strict=True):
            with fence(part[0].sequence):
                yield from self._judge([part], its_logits)

    def _judge(self, decided: Sequence[Part], logits: Tensor) -> list[JudgedRow]:
        chain = [
            ChainRow(s.params, s.tokens, s.num_prompt_tokens, guess.drafted, s.stop_ids, row.allowed)
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
            judged.append(JudgedRow(part, p, first, verdict))
            first += len(part[1].drafted) + 1
        return judged
