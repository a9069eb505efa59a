"""Making a trace: the target decodes alone, once; every draft then reads that text, once.

The text of a sampled trace is drawn with `gumbel`'s noise, which is keyed by the position alone. It is distributed as
any other mode's, so one text serves every rule, and gumbel's can be replayed exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from specdec_cli.drafted import Drafted
from specdec_cli.drafters import method_of, parts
from specdec_cli.drafters.contract import DraftRow, ScoresPaths
from specdec_cli.engine.driver import Driver
from specdec_cli.errors import UsageError
from specdec_cli.events import Finished, Stepped
from specdec_cli.lm.door import LM, Row
from specdec_cli.measure.predict.depth_pass import MAX_FED, DepthPass, hidden_states, read_off, trace_handle
from specdec_cli.measure.predict.draft_trace import (
    RANK_BEYOND,
    BoolArray,
    DraftTrace,
    Float32Array,
    GuessTrace,
    ModelTrace,
    UInt8Array,
)
from specdec_cli.measure.predict.trace import Trace, TracedPrompt, fingerprint
from specdec_cli.sampling.chain import ChainRow

if TYPE_CHECKING:
    from specdec_cli.drafters.contract import Drafter
    from specdec_cli.engine.decoding import Request
    from specdec_cli.engine.engine import Engine
    from specdec_cli.lm.files.origin import Origin

Watch = Callable[[int, int], None]


class Tell(Protocol):
    """Progress callback: the current phase of a long piece of work, and how much of it is done."""

    def __call__(self, phase: str, done: float = 0, total: float = 0, /) -> None:
        """Report progress; a total of 1 counts in per cent, a total of 0 is unknown."""
        ...


def untold(phase: str, done: float = 0, total: float = 0, /) -> None:
    """Ignore progress."""


class _InPhase(Protocol):
    def __call__(self, done: float, total: float = 1, /) -> None: ...


def in_phase(tell: Tell, phase: str) -> _InPhase:
    """Report that a phase begins; returns a callback for its progress, as a count or as a share."""
    tell(phase)

    def watch(done: float, total: float = 1, /) -> None:
        tell(phase, done, total)

    return watch


_MAX_LOGITS = 1 << 22  # numbers of one call's logits: 16 MB, whatever the vocabulary
_MAX_ROWS = 64


def trace_target(engine: Engine, requests: Sequence[Request], watch: Watch | None = None) -> Trace:
    """Decode every request without a draft and keep its tokens and their probabilities.

    Args:
        engine: idle; its draft is not asked.
        requests: the workload.
        watch: called with the requests that have ended and all of them.

    Raises:
        UsageError: a request that the engine refuses.
    """
    assert not engine.has_work, "a trace needs an idle engine"
    outputs, log_p = _decode(engine, requests, watch or (lambda _done, _total: None))
    prompts = [
        TracedPrompt(
            tuple(request.token_ids),
            tuple(output),
            min(len(request.token_ids) + request.params.max_new_tokens, engine.target.max_context),
            request.params,
            request.row.category,
        )
        for request, output in zip(requests, outputs, strict=True)
    ]
    known_by = fingerprint(engine.tokenizer) if engine.tokenizer is not None else None
    flat = np.array([value for logprobs in log_p for value in logprobs], dtype=np.float32)
    origin = engine.target.origin
    return Trace(engine.target.name, engine.num_tokens, engine.eos_token_ids, known_by, prompts, flat, origin=origin)


def _decode(engine: Engine, requests: Sequence[Request], watch: Watch) -> tuple[list[list[int]], list[list[float]]]:
    """Each request's output tokens, and their log-probabilities under p."""
    outputs: list[list[int]] = [[] for _ in requests]
    log_p: list[list[float]] = [[] for _ in requests]
    num_ended = 0
    with Driver(engine) as driver:
        places = {_add(driver, request): place for place, request in enumerate(requests)}
        for event in (event for events in driver.steps() for event in events):
            if isinstance(event, Stepped):
                for emitted in event.emitted:
                    place = places[emitted.sequence_id]
                    outputs[place] += emitted.tokens
                    log_p[place] += [logprob.logprob for logprob in emitted.logprobs] or [0.0] * len(emitted.tokens)
            elif isinstance(event, Finished):
                num_ended += 1
                watch(num_ended, len(requests))
    return outputs, log_p


def _add(driver: Driver, request: Request) -> int:
    """Queue a request without a draft; at temperature 0 p is one-hot, and its logarithm needs no asking."""
    num = None if request.params.temperature == 0 else 0
    return driver.add(request.token_ids, replace(request.params, logprobs=num), 0, verify="gumbel")


def trace_draft(
    trace: Trace, drafter: Drafter, k_max: int, watch: Watch | None = None, target: LM | None = None
) -> DraftTrace:
    """A draft's predictions along the trace's text.

    Args:
        trace: the target's.
        drafter: loaded; a draft that scores paths gives its distributions at every start, another language model is
            teacher-forced, and any other draft is asked at every start for 1…k_max tokens.
        k_max: most tokens at a start; a teacher-forced model's trace serves every k.
        watch: called with the prompts done and in all.
        target: reads the text again for a draft that reads its hidden states.

    Raises:
        UsageError: the draft samples and is no language model: only a measurement tells its acceptance.
    """
    tell = watch or (lambda _done, _total: None)
    if isinstance(drafter, ScoresPaths):
        return DepthPass(trace, drafter, k_max, target).run(tell)
    lm = drafter.forced_lm(trace.temperature)
    if lm is not None:
        return _ForcedPass(trace, lm).run(tell)
    return _trace_guesses(trace, drafter, k_max, tell, target)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Positions begin…end-1 of one prompt's output, scored in one forward; `first` is begin's place among all N."""

    place: int
    begin: int
    end: int
    first: int
    is_last: bool


@dataclass(slots=True)
class _ForcedPass:
    """One teacher-forced pass of a language model over a trace's text."""

    trace: Trace
    lm: LM

    def run(self, watch: Watch) -> ModelTrace:
        num = self.trace.num_output_tokens
        log_q = np.full(num, -np.inf, dtype=np.float32)
        is_argmax, is_gumbel = np.zeros(num, dtype=np.bool_), np.zeros(num, dtype=np.bool_)
        rank, confidence = np.full(num, RANK_BEYOND, dtype=np.uint8), np.ones(num, dtype=np.float32)
        held: set[int] = set()
        try:
            for pieces in self._groups():
                held |= {piece.place for piece in pieces}
                at = np.concatenate([np.arange(p.begin, p.end) + p.first for p in pieces])
                log_q[at], is_argmax[at], is_gumbel[at], rank[at], confidence[at] = self._score(pieces)
                for piece in pieces:
                    if piece.is_last:
                        self.lm.release(trace_handle(piece.place))
                        held.discard(piece.place)
                watch(pieces[-1].place + pieces[-1].is_last, len(self.trace.prompts))
        finally:
            for place in held:
                self.lm.release(trace_handle(place))
        return ModelTrace(log_q, is_argmax, is_gumbel, self.lm.max_context, self.lm.origin, rank, confidence)

    def _groups(self) -> Iterator[list[_Piece]]:
        """Pieces that go into one forward together, within bounds of logits, tokens, rows and cache."""
        group: list[_Piece] = []
        num_logits = num_fed = num_blocks = 0
        for piece in self._pieces():
            prompt = self.trace.prompts[piece.place]
            fed = piece.end - piece.begin + (min(len(prompt.token_ids), MAX_FED) if piece.begin == 0 else 0)
            blocks = -(-(len(prompt.token_ids) + len(prompt.output)) // self.lm.block_size)
            is_full = (
                num_logits + piece.end - piece.begin > self._num_positions
                or num_fed + fed > MAX_FED
                or num_blocks + blocks > self.lm.num_blocks
                or len(group) == _MAX_ROWS
            )
            if group and (is_full or piece.begin > 0):
                yield group
                group, num_logits, num_fed, num_blocks = [], 0, 0, 0
            group.append(piece)
            num_logits, num_fed, num_blocks = num_logits + piece.end - piece.begin, num_fed + fed, num_blocks + blocks
            if not piece.is_last:  # its prompt goes on in the next forward, alone
                yield group
                group, num_logits, num_fed, num_blocks = [], 0, 0, 0
        if group:
            yield group

    @property
    def _num_positions(self) -> int:
        return max(1, min(MAX_FED, _MAX_LOGITS // self.lm.vocab_size))

    def _pieces(self) -> Iterator[_Piece]:
        first = 0
        for place, prompt in enumerate(self.trace.prompts):
            readable = self.lm.max_context - len(prompt.token_ids) + 1
            end = min(len(prompt.output), max(readable, 0))
            for begin in range(0, end, self._num_positions):
                until = min(begin + self._num_positions, end)
                yield _Piece(place, begin, until, first, until == end)
            first += len(prompt.output)

    def _score(self, pieces: Sequence[_Piece]) -> tuple[Float32Array, BoolArray, BoolArray, UInt8Array, Float32Array]:
        """Figures of the pieces' tokens as `read_off` gives them, one piece after another."""
        rows: list[Row] = []
        chain: list[ChainRow] = []
        emitted: list[int] = []
        for piece in pieces:
            prompt = self.trace.prompts[piece.place]
            context = [*prompt.token_ids, *prompt.output[: piece.end - 1]]
            if piece.begin == 0:
                for fed in range(MAX_FED, len(prompt.token_ids), MAX_FED):
                    self.lm.score([Row(trace_handle(piece.place), context[:fed], 0)])
            rows.append(Row(trace_handle(piece.place), context, piece.end - piece.begin))
            known = len(prompt.token_ids) + piece.begin
            stop_ids = self.trace.stop_ids(prompt)
            drafted = Drafted.chain(context[known:])
            chain.append(ChainRow(prompt.params, context[:known], len(prompt.token_ids), drafted, stop_ids))
            emitted += prompt.output[piece.begin : piece.end]
        return read_off(self.lm.score(rows), chain, emitted, self.trace.num_tokens)


def _trace_guesses(trace: Trace, drafter: Drafter, k_max: int, watch: Watch, target: LM | None) -> GuessTrace:
    """Ask a draft without chance at every start, in the text's order, so that its state grows as in decoding.

    One with a model in it is asked once for all k: it drafts token after token, and fewer are the first of more.
    """
    is_asked_once = bool(drafter.taps) or drafter.draws
    asked = (k_max,) if is_asked_once else range(1, k_max + 1)
    num_guessed = np.zeros((trace.num_output_tokens, k_max), dtype=np.int16)
    num_matching = np.zeros_like(num_guessed)
    first = 0
    for place, prompt in enumerate(trace.prompts):
        row = DraftRow(
            handle=trace_handle(place),
            context=list(prompt.token_ids),
            num_prompt_tokens=len(prompt.token_ids),
            k=1,
            params=prompt.params,
            stop_ids=trace.stop_ids(prompt),
            needs_q=True,  # by which a draft with chance is known
            shares_noise=False,
            p_min=0.0,
        )
        states = hidden_states(target, drafter.taps, prompt) if drafter.taps else None
        begin = 0
        try:
            for start in range(1, len(prompt.output)):
                row.context = [*prompt.token_ids, *prompt.output[:start]]
                if states is not None:
                    row.features, begin = states[begin : len(row.context) - 1], len(row.context) - 1
                for row.k in asked:
                    tokens = _ask(drafter, row)
                    matching = _num_matching(tokens, prompt.output[start:])
                    for k in range(1, k_max + 1) if is_asked_once else [row.k]:
                        num_guessed[first + start, k - 1] = min(k, len(tokens))
                        num_matching[first + start, k - 1] = min(k, matching)
        finally:
            drafter.release(trace_handle(place))
        first += len(prompt.output)
        watch(place + 1, len(trace.prompts))
    return GuessTrace(num_guessed, num_matching, drafter.max_context, draft_origin(drafter))


def has_ranks(drafter: Drafter, temperature: float) -> bool:
    """Whether the trace of a draft has ranks of tokens, which predict trees."""
    return isinstance(drafter, ScoresPaths) or drafter.forced_lm(temperature) is not None


def draft_origin(drafter: Drafter) -> Origin | None:
    """Origin of the model that a draft guesses with, the second one's of a pair; None without a model of its own."""
    last = parts(drafter)[-1]
    if isinstance(last, ScoresPaths):
        return last.origin
    return None if last.lm is None else last.lm.origin


def _ask(drafter: Drafter, row: DraftRow) -> Sequence[int]:
    guesses = drafter.propose([row])[0].read()
    if guesses.q is not None:
        raise UsageError(
            f"the draft `{method_of(drafter)}` samples and is not a language model",
            "a trace cannot tell its acceptance: measure every k (--exhaustive)",
        )
    return guesses.drafted.tokens


def _num_matching(tokens: Sequence[int], text: Sequence[int]) -> int:
    num = 0
    for guess, token in zip(tokens, text, strict=False):
        if guess != token:
            break
        num += 1
    return num
