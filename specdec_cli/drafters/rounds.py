"""Guesses from a draft's logits: chains in one call, or round by round, each of which adds a depth to every row's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from specdec_cli.drafters.growth import Growth
from specdec_cli.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.drafters.contract import DraftRow
    from specdec_cli.lm.cache.unread import Unread
    from specdec_cli.lm.door import Continuations, Draw
    from specdec_cli.sampling.chain import Distribution


def grow_deeper(
    drafts: Sequence[Growth], logits: Tensor, num_tokens: int, name: str, confidence: Tensor | None = None
) -> None:
    """Give every row's guess its next depth, or end it.

    Where a row has tokens already and now a distribution that is none, it ends with what it has, whatever that is, as
    it decides nothing.

    Args:
        drafts: rows that want more.
        logits: [ends of all rows, V] float32; left unchanged.
        num_tokens: V, the real vocabulary.
        name: of the draft, for messages.
        confidence: how sure the draft is at every end [n], whatever it draws there; None takes the largest probability.

    Raises:
        LogitsError: a row has no distribution at its first token.
    """
    from specdec_cli.sampling.chain import LogitsError, distribution

    ends = [(draft, end) for draft in drafts for end in draft.to_distribute()]
    try:
        q = distribution(logits, [end for _, end in ends], num_tokens)
    except LogitsError as error:
        draft = ends[error.row][0]
        if draft.tokens:
            draft.is_done = True
            return
        raise LogitsError(f"the draft `{name}`: {error.message}", draft.place, error.hint) from error
    _take_children(drafts, q, confidence)


def check_guess(unread: Unread | None, name: str, hint: str) -> None:
    """Refuse an earlier guess that the host has read by now and that holds something else than tokens.

    Args:
        unread: the guess, if there was one.
        name: of the draft, for messages.
        hint: what to do about it.

    Raises:
        RunError: a largest logit was no finite number.
    """
    if unread is not None and unread.is_read and not unread.is_whole:
        raise RunError(f"the draft `{name}` gave no finite number as its largest logit", hint)


def draw_of(row: DraftRow, num: int) -> Draw | None:
    """How so many tokens of a plain row are drawn; None where the likeliest are taken."""
    from specdec_cli.lm.door import Draw
    from specdec_cli.sampling import noise

    params = row.params
    if params.temperature == 0:
        return None
    uniforms = noise.uniforms(params.seed, params.index, len(row.context), noise.Purpose.DRAFT, num)
    return Draw(params.temperature, params.top_k, params.top_p, params.min_p, uniforms.tolist())


def take_chains(drafts: Sequence[Growth], found: Continuations) -> None:
    """Give every plain row the chain that was guessed for it in one call."""
    for i, (draft, tokens) in enumerate(zip(drafts, found.tokens, strict=True)):
        draft.take_chain(tokens, found.unread, found.q[i] if draft.needs_q else None)


def _take_children(drafts: Sequence[Growth], q: Distribution, confidence: Tensor | None) -> None:
    """Choose the children of every end and keep them.

    Noise is keyed and has no state: a draw that is not kept changes no other.
    """
    from specdec_cli.sampling.draft import draft_children, likely_children

    ends = [draft.num_ends for draft in drafts]
    starts = [0, *accumulate(ends)]
    is_unsure = any(draft.row.p_min > 0 for draft in drafts)
    sure = [1.0] * starts[-1]
    if is_unsure:
        sure = (q.confidence() if confidence is None else confidence).tolist()
    wanted = [draft.wanted(sure[start : start + num]) for draft, start, num in zip(drafts, starts, ends, strict=False)]
    if any(draft.is_dynamic for draft in drafts):
        nums = [one.num for draft, its in zip(drafts, wanted, strict=True) for one in its]
        likely = likely_children(q, nums)
    children = draft_children(q, [one for its in wanted for one in its])
    for draft, start, num in zip(drafts, starts, ends, strict=False):
        if draft.is_dynamic:
            draft.grow_likely(likely[start : start + num])
        else:
            draft.grow(children[start : start + num], q, start)
