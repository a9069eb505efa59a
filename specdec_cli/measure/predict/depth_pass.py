"""The pass of a draft that gives its distributions by depth: at every start of a trace's text, K tokens at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec_cli.drafted import Drafted
from specdec_cli.drafters.contract import DraftRow
from specdec_cli.lm.door import LM, Row, Tap, Tapped
from specdec_cli.measure.predict.draft_trace import (
    NUM_LIKELIEST,
    RANK_BEYOND,
    BoolArray,
    DepthTrace,
    Float32Array,
    UInt8Array,
)
from specdec_cli.measure.predict.trace import Trace, TracedPrompt
from specdec_cli.sampling import noise
from specdec_cli.sampling.chain import ChainRow, Distribution, distribution
from specdec_cli.sampling.draft import ranks

if TYPE_CHECKING:
    from specdec_cli.drafters.contract import Drafter, ScoresPaths

    class ScoringDrafter(Drafter, ScoresPaths, Protocol):
        """A drafter that scores paths."""


MAX_FED = 1024  # tokens of one forward
_MAX_LOGITS = 1 << 22  # numbers of one call's logits
_MAX_STATES = 1 << 26  # numbers of hidden states that are held at once, but for one prompt's
_MAX_ROWS = 64


@dataclass(slots=True)
class _Walk:
    """A prompt whose output is walked through.

    Args:
        prompt: with its output.
        first: place of its first output token among those of all prompts.
        row: as the drafter sees it.
        states: the target's hidden states of the text, for a draft that reads them.
        start: the output position before which the next guess begins.
        num_given: positions whose states the drafter has.
    """

    prompt: TracedPrompt
    first: int
    row: DraftRow
    states: Tensor | None
    start: int = 1
    num_given: int = 0

    def path(self, most: int, max_context: int | None) -> tuple[int, ...]:
        """The text's next tokens, as many as the draft may guess here; none at the output's end."""
        room = most if max_context is None else max_context + 1 - len(self.prompt.token_ids) - self.start
        return self.prompt.output[self.start : self.start + max(0, min(most, room))]

    def look(self) -> DraftRow:
        """The row at this start, with the states that are new."""
        self.row.context = [*self.prompt.token_ids, *self.prompt.output[: self.start]]
        if self.states is not None:
            end = len(self.row.context) - 1
            self.row.features = self.states[self.num_given : end] if end > self.num_given else None
            self.num_given = end
        return self.row


@dataclass(slots=True)
class DepthPass:
    """One walk of a draft over a trace's text, several prompts at a time.

    Args:
        trace: of the target.
        drafter: loaded; it also scores paths.
        k_max: most tokens guessed at a start.
        target: reads the text again for a draft that reads its hidden states.
    """

    trace: Trace
    drafter: ScoringDrafter
    k_max: int
    target: LM | None
    _found: DepthTrace = field(init=False)

    def run(self, watch: Callable[[int, int], None]) -> DepthTrace:
        """Walk over all outputs.

        Args:
            watch: called with the prompts done and in all.
        """
        origin, limit, num = self.drafter.origin, self.drafter.most_depth, self.trace.num_output_tokens
        self._found = DepthTrace.empty(num, self.k_max, self.drafter.max_context, origin, limit)
        num_done = 0
        for walks in self._groups():
            try:
                while walking := [walk for walk in walks if walk.path(self._most, self.drafter.max_context)]:
                    self._step(walking)
            finally:
                for walk in walks:
                    self.drafter.release(walk.row.handle)
            num_done += len(walks)
            watch(num_done, len(self.trace.prompts))
        return self._found

    def _groups(self) -> Iterator[list[_Walk]]:
        """Prompts that are walked through together, within bounds of logits, rows, cache and hidden states."""
        most = max(1, min(_MAX_ROWS, _MAX_LOGITS // (self.trace.num_tokens * self.k_max)))
        firsts = accumulate((len(prompt.output) for prompt in self.trace.prompts), initial=0)
        group: list[_Walk] = []
        most_blocks = 0 if self._holder is None else self._holder.num_blocks
        num_blocks = num_states = 0
        for place, (prompt, first) in enumerate(zip(self.trace.prompts, firsts, strict=False)):
            blocks = self._blocks(prompt)
            is_full = len(group) == most or num_states > _MAX_STATES
            if group and (is_full or num_blocks + blocks > most_blocks):
                yield group
                group, num_blocks, num_states = [], 0, 0
            group.append(self._walk(place, prompt, first))
            num_blocks += blocks
            num_states += 0 if group[-1].states is None else group[-1].states.numel()
        if group:
            yield group

    @property
    def _most(self) -> int:
        limit = self.drafter.most_depth
        return self.k_max if limit is None else min(self.k_max, limit)

    @property
    def _holder(self) -> LM | None:
        """The model whose cache bounds the draft's: its own, or the target, whose blocks a draft head has as well."""
        return self.target if self.drafter.lm is None else self.drafter.lm

    def _blocks(self, prompt: TracedPrompt) -> int:
        lm = self._holder
        num = len(prompt.token_ids) + len(prompt.output) + self.k_max
        return 0 if lm is None else -(-num // lm.block_size)

    def _walk(self, place: int, prompt: TracedPrompt, first: int) -> _Walk:
        row = DraftRow(
            handle=trace_handle(place),
            context=list(prompt.token_ids),
            num_prompt_tokens=len(prompt.token_ids),
            k=self.k_max,
            params=prompt.params,
            stop_ids=self.trace.stop_ids(prompt),
            needs_q=True,
            shares_noise=False,
            p_min=0.0,
        )
        taps = self.drafter.taps
        return _Walk(prompt, first, row, hidden_states(self.target, taps, prompt) if taps else None)

    def _step(self, walks: Sequence[_Walk]) -> None:
        """Score the text's next tokens at each walk's start, and go one token on."""
        paths = [walk.path(self._most, self.drafter.max_context) for walk in walks]
        rows = [walk.look() for walk in walks]
        logits = torch.cat(self.drafter.path_logits(rows, paths))
        chain = [
            ChainRow(row.params, row.context, row.num_prompt_tokens, Drafted.chain(path[:-1]), row.stop_ids)
            for row, path in zip(rows, paths, strict=True)
        ]
        log_q, is_argmax, is_gumbel, rank, confidence = read_off(
            logits, chain, [t for path in paths for t in path], self.trace.num_tokens
        )
        places = np.concatenate(
            [np.full(len(path), walk.first + walk.start) for walk, path in zip(walks, paths, strict=True)]
        )
        depths = np.concatenate([np.arange(len(path)) for path in paths])
        self._found.log_q[places, depths] = log_q
        self._found.is_argmax[places, depths] = is_argmax
        self._found.is_gumbel[places, depths] = is_gumbel
        assert self._found.rank is not None, "a new trace has ranks"
        assert self._found.confidence is not None, "a new trace has confidences"
        self._found.rank[places, depths] = rank
        self._found.confidence[places, depths] = confidence
        for walk in walks:
            walk.start += 1


def read_off(
    logits: Tensor, chain: Sequence[ChainRow], emitted: Sequence[int], num_tokens: int
) -> tuple[Float32Array, BoolArray, BoolArray, UInt8Array, Float32Array]:
    """log q, argmax and gumbel matches and ranks of tokens, and the draft's confidence in its own.

    Args:
        logits: [n, V] float32 of the draft.
        chain: the rows' positions, n in all.
        emitted: the text's tokens there.
        num_tokens: V, the real vocabulary.
    """
    q = distribution(logits, chain, num_tokens)
    tokens = torch.tensor(emitted, device=q.argmax.device)
    is_argmax: BoolArray = (q.argmax == tokens).cpu().numpy()
    rank = ranks(q, tokens, RANK_BEYOND).cpu().numpy().astype(np.uint8)
    likeliest = logits[:, :num_tokens].topk(min(NUM_LIKELIEST, num_tokens)).values
    confidence = likeliest.float().softmax(dim=1)[:, 0].cpu().numpy()
    if q.probs is None:
        return np.where(is_argmax, 0.0, -np.inf).astype(np.float32), is_argmax, is_argmax, rank, confidence
    log_q = q.probs.gather(1, tokens[:, None])[:, 0].log().float().cpu().numpy()
    return log_q, is_argmax, _gumbel_matches(q, chain, tokens, is_argmax), rank, confidence


def _gumbel_matches(q: Distribution, chain: Sequence[ChainRow], tokens: Tensor, is_argmax: BoolArray) -> BoolArray:
    """Whether the text's own noise makes the draft choose the emitted tokens [n]; a one-hot q its argmax."""
    assert q.probs is not None, "noise is for positions that sample"
    keys = [(r.params, len(r.context) + j) for r in chain for j in range(len(r.drafted) + 1)]
    seeds, indices = [params.seed for params, _ in keys], [params.index for params, _ in keys]
    chosen = noise.gumbel_argmax(q.probs, seeds, indices, [position for _, position in keys])
    return np.where(q.one_hot, is_argmax, (chosen == tokens).cpu().numpy())


def trace_handle(place: int) -> int:
    """A handle that no engine uses: theirs count from 0."""
    return -1 - place


def hidden_states(target: LM | None, taps: Sequence[Tap], prompt: TracedPrompt) -> Tensor:
    """The target's states [tokens, taps, hidden] of a prompt and its output but the last token."""
    assert target is not None, "hidden states are the target's"
    context, handle, states = [*prompt.token_ids, *prompt.output[:-1]], trace_handle(0), list[Tensor]()
    try:
        for end in range(MAX_FED, len(context) + MAX_FED, MAX_FED):
            row = Row(handle, context[:end], 0, tapped=Tapped())
            target.score([row])
            if row.tapped is not None and row.tapped.states is not None:
                states.append(row.tapped.states)
    finally:
        target.release(handle)
    return torch.cat(states)[:, [target.taps.index(tap) for tap in taps]]
