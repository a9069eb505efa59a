"""The work of a step, from drafting to verdicts: the engine does it for its requests, a cost profile for contexts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from specdec_cli.drafters.contract import DraftRow, Guesses
from specdec_cli.engine.clock import Clock
from specdec_cli.engine.features import FeatureBook
from specdec_cli.engine.judging import Fence, Judge, JudgedRow, Part
from specdec_cli.engine.scheduler import Scheduled
from specdec_cli.engine.sequence import Sequence as Request
from specdec_cli.engine.verify import rule_of
from specdec_cli.lm.door import LM, Row, Tap, Tapped

Propose = Callable[[Sequence[tuple[str, DraftRow]]], list[Guesses]]
"""Guesses for rows, each by the drafter named beside it."""
Fit = Callable[[Sequence[Scheduled], Sequence[Guesses]], list[Part]]
"""What is verified of the guesses; rows that end before may be left out."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Result of a step's work.

    Args:
        parts: rows with what was verified for them.
        judged: the verdicts of those rows that get a next token.
        draft_seconds: seconds of drafting.
        verify_seconds: seconds of the target's forward.
    """

    parts: list[Part]
    judged: list[JudgedRow]
    draft_seconds: float
    verify_seconds: float


def as_proposed(batch: Sequence[Scheduled], guesses: Sequence[Guesses]) -> list[Part]:
    """Every row with its whole guess."""
    return list(zip(batch, guesses, strict=True))


def unfenced(_: Request) -> AbstractContextManager[None]:
    """Let an exception through."""
    return nullcontext()


def unknown_again(sequence: Request) -> None:
    """Nothing of a sequence is in the cache."""
    sequence.num_computed = 0


def untapped(_: Request) -> Sequence[Tap]:
    """No hidden states are read."""
    return ()


@dataclass(slots=True)
class Stepper:
    """Propose, score, distribution, verify; the sequences take nothing of the verdicts yet.

    Args:
        target: scores.
        propose: asks the drafters.
        judge: turns logits into verdicts.
        clock: of the target's device.
        p_min: drafts stop before a position whose largest q is below this.
        fit: cuts guesses to what may be verified.
        fence: stands around what is one request's own.
        forget: told of each sequence whose cached tokens a broken forward has made unknown.
        taps: the target's hidden states that a sequence's drafter reads.
        features: those that drafters have not read yet.
    """

    target: LM
    propose: Propose
    judge: Judge
    clock: Clock
    p_min: float = 0.0
    fit: Fit = as_proposed
    fence: Fence = unfenced
    forget: Callable[[Request], None] = unknown_again
    taps: Callable[[Request], Sequence[Tap]] = untapped
    features: FeatureBook = field(default_factory=FeatureBook)

    def run(self, batch: Sequence[Scheduled]) -> StepWork:
        """Do a step's work for scheduled rows.

        Raises:
            Exception: the forward failed; what its sequences had in the cache is given back.
        """
        mark = self.clock.mark
        marks = [mark()]
        guesses = self._guesses(batch)
        marks.append(mark())
        parts = self.fit(batch, guesses)
        marks.append(mark())
        logits = self._score(parts)
        marks.append(mark())
        judged = self.judge.judge([part for part in parts if part[0].is_decided], logits, self.fence)
        for one in judged:
            self.features.accept(one.part[0].sequence.id, one.verdict.path)
        return StepWork(parts, judged, *(self.clock.seconds(*marks[i : i + 2]) for i in (0, 2)))

    def _guesses(self, batch: Sequence[Scheduled]) -> list[Guesses]:
        asked = [(row.sequence.draft, self._draft_row(row)) for row in batch if row.k > 0]
        proposed = iter(self.propose(asked))
        return [next(proposed) if row.k > 0 else Guesses() for row in batch]

    def _draft_row(self, row: Scheduled) -> DraftRow:
        sequence = row.sequence
        rule = rule_of(sequence.verify, sequence.params.temperature)
        return DraftRow(
            handle=sequence.id,
            context=sequence.tokens,
            num_prompt_tokens=sequence.num_prompt_tokens,
            k=row.k,
            params=sequence.params,
            stop_ids=sequence.stop_ids,
            needs_q=rule.needs_q,
            shares_noise=rule.shares_noise,
            p_min=self.p_min,
            prediction=sequence.prediction,
            cache_salt=sequence.cache_salt,
            tree=sequence.tree,
            features=self._features(sequence),
        )

    def _features(self, sequence: Request) -> torch.Tensor | None:
        """The hidden states that its drafter has not read yet."""
        taps = self.taps(sequence)
        if not taps:
            return None
        columns = [self.target.taps.index(tap) for tap in taps]
        return self.features.take(sequence.id, len(sequence.tokens), columns)

    def _score(self, parts: Sequence[Part]) -> torch.Tensor:
        """One forward over all rows: prompts' chunks and k+1 verify rows together; none where all rows have ended."""
        if not parts:
            return torch.empty(0, self.target.vocab_size)
        rows = [self._row(row, guess) for row, guess in parts]
        try:
            logits = self.target.score(rows)
        except BaseException:
            for row, _ in parts:  # what a forward that broke off has written is not known
                self.target.release(row.sequence.id)
                self.forget(row.sequence)
            raise
        for row, _ in parts:
            row.sequence.num_computed = min(row.num_fed, len(row.sequence.tokens) - 1)
        for scored in rows:
            if scored.tapped is not None:
                self.features.add(scored.handle, scored.tapped, len(scored.context))
        return logits

    def _row(self, row: Scheduled, guess: Guesses) -> Row:
        sequence = row.sequence
        tapped = Tapped() if self.taps(sequence) else None
        if not row.is_decided:
            return Row(sequence.id, sequence.tokens[: row.num_fed], 0, tapped=tapped)
        num_logits = len(guess.drafted) + 1
        return Row(sequence.id, sequence.tokens, num_logits, guess.drafted, guess.unread, tapped=tapped)
