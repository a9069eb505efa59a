"""The work of a step on the models, from drafting to verdicts; the engine and a cost profile run it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specdec_cli.drafted import CONTEXT_END
from specdec_cli.drafters.contract import DraftRow, DraftsOnDevice, Guesses
from specdec_cli.engine.features import FeatureBook
from specdec_cli.engine.rounds_ahead import RoundsAhead
from specdec_cli.engine.scheduler import StepRow
from specdec_cli.engine.verify import Verdict, VerifyRow, verify
from specdec_cli.events import Noticed
from specdec_cli.lm.door import LM, Row, ScoresOnDevice, Tapped
from specdec_cli.sampling.chain import ChainRow, LargestLogits, LogitsError, distribution
from specdec_cli.sampling.grammar import GrammarError
from specdec_cli.transfer import sent

if TYPE_CHECKING:
    from specdec_cli.engine.sequence import Sequence as EngineSequence
    from specdec_cli.lm.forward.device_rounds import RoundEnd
    from specdec_cli.sampling.grammar import BoolArray, Matcher

Propose = Callable[[Sequence[tuple[str, DraftRow]]], list[Guesses]]
"""Guesses for rows, each by the drafter named beside it."""


class Clock:
    """Marks moments of a device's work: by the host's clock, or by a GPU's events, without waiting for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._stream: Any = None

    def mark(self) -> Any:
        """This moment, or that at which a GPU comes to it."""
        if not self._is_cuda:
            return perf_counter()
        cuda: Any = torch.cuda
        event = cuda.Event(enable_timing=True)
        if self._stream is None:
            self._stream = cuda.current_stream(self._device)  # to ask for it takes longer than to mark a moment
        event.record(self._stream)
        return event

    def has_passed(self, moment: Any) -> bool:
        """Whether the device has come to a mark."""
        return not self._is_cuda or bool(moment.query())

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to another; waits for a GPU that has not come to it yet."""
        if not self._is_cuda:
            return float(end - begin)
        if not end.query():
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


@dataclass(slots=True)
class Stepper:
    """Draft, fit the grammars, score, verify. Every row gets its verdict or its error; no sequence takes tokens yet.

    Args:
        target: scores.
        propose: asks the drafters.
        num_tokens: V, the real vocabulary.
        rates: of verification mode synthetic, the chance of each drafted token when all before it stand.
        p_min: drafts stop before a position whose largest q is below this.
        features: the target's hidden states that drafters have not read yet.
        on_device: the drafter of a name, if it can go on without the host; None reads each round before the next one.

    Attributes:
        goes_ahead: it may launch a round before it has read the one before.
        notices: that have not been reported yet.
    """

    target: LM
    propose: Propose
    num_tokens: int
    rates: Sequence[float] = ()
    p_min: float = 0.0
    features: FeatureBook = field(default_factory=FeatureBook)
    on_device: Callable[[str], DraftsOnDevice | None] | None = None
    goes_ahead: bool = field(init=False, default=False)
    notices: list[Noticed] = field(init=False, default_factory=list)
    _clock: Clock = field(init=False)
    _ahead: RoundsAhead | None = field(init=False, default=None)
    _untimed: deque[tuple[Any, Any, Any, Any]] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        """Take the clock of the target's device."""
        self._clock = Clock(self.target.device)
        if self.on_device is not None and isinstance(self.target, ScoresOnDevice) and self.target.recording != "none":
            parts = self.num_tokens, self.features, self._clock, self.rates, self.verify, self.notices
            self._ahead, self.goes_ahead = RoundsAhead(self.target, self.on_device, *parts), True

    def run(self, rows: Sequence[StepRow], *, goes_on: bool = False) -> tuple[float, float]:
        """Do a step's work for scheduled rows.

        Args:
            rows: the step's.
            goes_on: in the next step the same sequences decode with the same k, unless some end.

        Returns:
            Seconds of drafting and of the target's forward. Of a prompt's chunk beside rounds, a later step has them:
            the device is not waited for.

        Raises:
            Exception: the forward failed; the caches of its sequences and of those in `forget` may hold anything.
        """
        ahead, seconds = self._ahead, self._clock.seconds
        draft_seconds, score_seconds = 0.0, 0.0
        ready = set[int]() if ahead is None else ahead.go_on(rows, goes_on=goes_on)
        others = [row for row in rows if row.sequence.id not in ready]
        # A device does this behind the round that is under way, before the host reads that one.
        logits = self._draft_and_score(others) if others else None
        if ahead is not None:
            draft_seconds, score_seconds = ahead.take(rows)
        decided = [row for row in others if row.is_decided]
        if logits is not None and (ahead is None or not goes_on or ready or not ahead.begin(decided)):
            self.verify([row for row in decided if row.error is None], logits)
        goes_ahead = ahead is not None and (ready or ahead.is_under_way)
        while self._untimed and (not goes_ahead or self._clock.has_passed(self._untimed[0][-1])):
            begin, drafted, fitted, scored = self._untimed.popleft()
            draft_seconds += seconds(begin, drafted)
            score_seconds += seconds(fitted, scored)
        for row in rows:
            if row.taps and row.verdict is not None:
                self.features.accept(row.sequence.id, row.verdict.path)
        return draft_seconds, score_seconds

    def forget(self) -> list[EngineSequence]:
        """Drop the rounds that were launched ahead, after an error; returns their sequences."""
        self._untimed.clear()
        return [] if self._ahead is None else self._ahead.forget()

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence that was released."""
        self.features.drop(sequence_id)
        if self._ahead is not None:
            self._ahead.drop(sequence_id)

    def _draft_and_score(self, rows: Sequence[StepRow]) -> Tensor:
        """Give rows their guesses and have the target score them; logits as `_score` has them."""
        mark = self._clock.mark
        begin = mark()
        drafting = [row for row in rows if row.k > 0]
        draft_rows = [(row.sequence.draft, self._draft_row(row)) for row in drafting]
        for row, guesses in zip(drafting, self.propose(draft_rows), strict=True):
            row.guesses = guesses
        drafted = mark()
        self._fit_grammars(rows)
        fitted = mark()
        logits = self._score([row for row in rows if row.error is None])
        self._untimed.append((begin, drafted, fitted, mark()))
        return logits

    def _draft_row(self, row: StepRow) -> DraftRow:
        """The part of a row that its drafter sees, with the hidden states that it has not read yet."""
        sequence, features = row.sequence, None
        if row.taps:
            columns = [self.target.taps.index(tap) for tap in row.taps]
            features = self.features.take(sequence.id, len(sequence.tokens), columns)
        return DraftRow(
            handle=sequence.id,
            context=sequence.tokens,
            num_prompt_tokens=sequence.num_prompt_tokens,
            k=row.k,
            params=sequence.params,
            stop_ids=sequence.stop_ids,
            needs_q=sequence.rule.needs_q,
            shares_noise=sequence.rule.shares_noise,
            p_min=self.p_min,
            prediction=sequence.prediction,
            cache_salt=sequence.cache_salt,
            tree=sequence.tree,
            features=features,
        )

    def _fit_grammars(self, rows: Sequence[StepRow]) -> None:
        """Cut guesses at tokens that their row's grammar refuses, and give rows the masks of the places to verify."""
        for i, row in enumerate(rows):
            matcher = row.sequence.matcher
            if matcher is not None and row.is_decided:
                try:
                    row.guesses, row.allowed = fit(row.guesses.read(), matcher, i)
                except Exception as error:
                    row.error = error

    def _score(self, rows: Sequence[StepRow]) -> Tensor:
        """One forward over all rows, prompts' chunks and k + 1 places to verify together; logits of the latter."""
        if not rows:
            return torch.empty(0, self.target.vocab_size)
        lm_rows = [_lm_row(row) for row in rows]
        logits = self.target.score(lm_rows)
        for row, lm_row in zip(rows, lm_rows, strict=True):
            row.sequence.num_computed = min(row.num_fed, len(row.sequence.tokens) - 1)
            if lm_row.tapped is not None:
                self.features.add(lm_row.handle, lm_row.tapped, len(lm_row.context))
        return logits

    def verify(self, rows: Sequence[StepRow], logits: Tensor | LargestLogits, decided: Sequence[RoundEnd] = ()) -> None:
        """Verify all rows together; where that fails each alone, so that only the rows at fault end.

        Args:
            rows: those that get a next token.
            logits: [sum of drafted tokens + 1, V] float32, rows in order, or what `distribution` takes instead.
            decided: where a device has verified the rows, what `DecidedRound.ends` has of each.
        """
        if not rows:
            return
        starts = [*accumulate((len(row.guesses.drafted) + 1 for row in rows), initial=0)][:-1]
        try:
            self._verify(rows, logits, decided)
        except Exception:
            for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
                try:
                    self._verify([row], logits[start : start + len(row.guesses.drafted) + 1], decided[i : i + 1])
                except Exception as error:
                    row.error = error

    def _verify(self, rows: Sequence[StepRow], logits: Tensor | LargestLogits, decided: Sequence[RoundEnd]) -> None:
        chain_rows = []
        for row in rows:
            s = row.sequence
            drafted = row.guesses.drafted
            chain_rows.append(ChainRow(s.params, s.tokens, s.num_prompt_tokens, drafted, s.stop_ids, row.allowed))
        p = distribution(logits, chain_rows, self.num_tokens)
        # A tree that the device has chosen may turn out to have fewer nodes than places.
        starts = [*accumulate((len(row.drafted) + 1 for row in chain_rows), initial=0)][:-1]
        verify_rows = []
        for row in rows:
            s = row.sequence
            row.guesses = row.guesses.read()  # after `distribution`, which has waited for the device anyway
            verify_rows.append(VerifyRow(s.rule, s.params, len(s.tokens), row.guesses, self.rates))
        if decided:
            assert all(is_right for *_, is_right in decided), "a drafted token has a probability under its q"
            verdicts = [
                Verdict(row.guesses.drafted.path(end), own) for row, (end, own, _) in zip(rows, decided, strict=True)
            ]
        else:
            verdicts = verify(p, verify_rows, starts)
        for row, start, verdict in zip(rows, starts, verdicts, strict=True):
            row.p, row.first_place, row.verdict = p, start, verdict
        listed = [row for row in rows if row.sequence.params.logprobs is not None]
        wanted = [row.logprobs_wanted(row.verdict) for row in listed if row.verdict is not None]
        logprobs = iter(p.logprobs([one for its in wanted for one in its]))
        for row, its in zip(listed, wanted, strict=True):
            row.logprobs = list(islice(logprobs, len(its)))


def _lm_row(row: StepRow) -> Row:
    """The part of a row that the target reads."""
    sequence, tapped = row.sequence, Tapped() if row.taps else None
    if not row.is_decided:
        return Row(sequence.id, sequence.tokens[: row.num_fed], 0, tapped=tapped)
    drafted = row.guesses.drafted
    return Row(sequence.id, sequence.tokens, len(drafted) + 1, drafted, row.guesses.unread, tapped=tapped)


def fit(guesses: Guesses, matcher: Matcher, place: int) -> tuple[Guesses, BoolArray]:
    """Cut each path of a guess at the first token that the grammar refuses.

    Where tokens were sampled from q the refused one stays, as its path's last: p is 0 there, so that it never stands,
    and the own token comes from what q leaves of p. To drop it because of its value would skip that correction and
    bias the output. Without chance, and where the mode compares with the target's own choice, dropping it changes
    nothing.

    Args:
        guesses: drafted tokens, read; may be empty.
        matcher: the sequence's place in its grammar.
        place: the row's place in the call, for the error.

    Returns:
        The guess, and its allowed tokens [len(drafted) + 1, V] bool, one row for each place to verify.

    Raises:
        LogitsError: the grammar cannot continue, so that no token is left.
    """
    drafted, q = guesses.drafted, guesses.q
    try:
        seen = matcher.look(drafted)
    except GrammarError as error:
        raise LogitsError(error.message, place, error.hint) from error
    if q is None:
        kept = list(seen.fitting)
    else:
        kept = [node for node, parent in enumerate(drafted.parents) if parent in seen.masks]
    # What would follow a refused token, or one after which nothing is emitted, is never used.
    everything = np.ones_like(seen.masks[CONTEXT_END])
    allowed = np.stack([seen.masks.get(node, everything) for node in (CONTEXT_END, *kept)])
    if q is not None and len(kept) < len(drafted):
        q = q[sent(kept, torch.int64, q.device)] if kept else None
    return Guesses(drafted.keep(kept), q), allowed
