"""Readings of a trace's text: its tokens under a draft's logits, and the hidden states that a draft reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec_cli.lm.door import LM, Row, Tap, Tapped
from specdec_cli.measure.predict.draft_trace import RANK_BEYOND, BoolArray, Float32Array, UInt8Array
from specdec_cli.measure.predict.trace import TracedPrompt
from specdec_cli.sampling import noise
from specdec_cli.sampling.chain import ChainRow, Distribution, distribution
from specdec_cli.sampling.draft import ranks

MAX_FED = 1024  # tokens of one forward


def read_off(
    logits: Tensor, chain: Sequence[ChainRow], emitted: Sequence[int], num_tokens: int
) -> tuple[Float32Array, BoolArray, BoolArray, UInt8Array]:
    """log q, argmax and gumbel matches and ranks of tokens.

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
    if q.probs is None:
        return np.where(is_argmax, 0.0, -np.inf).astype(np.float32), is_argmax, is_argmax, rank
    log_q = q.probs.gather(1, tokens[:, None])[:, 0].log().float().cpu().numpy()
    return log_q, is_argmax, _gumbel_matches(q, chain, tokens, is_argmax), rank


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
    context, handle, found = [*prompt.token_ids, *prompt.output[:-1]], trace_handle(0), list[Tensor]()
    try:
        for end in range(MAX_FED, len(context) + MAX_FED, MAX_FED):
            row = Row(handle, context[:end], 0, tapped=Tapped())
            target.score([row])
            if row.tapped is not None and row.tapped.states is not None:
                found.append(row.tapped.states)
    finally:
        target.release(handle)
    return torch.cat(found)[:, [target.taps.index(tap) for tap in taps]]
