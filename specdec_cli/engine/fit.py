"""Drafted tokens against a grammar: cut where nothing after them can be emitted, with the masks of what is verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specdec_cli.drafted import CONTEXT_END
from specdec_cli.drafters.contract import Guesses
from specdec_cli.sampling.chain import LogitsError
from specdec_cli.sampling.grammar import GrammarError

if TYPE_CHECKING:
    from specdec_cli.sampling.grammar import BoolArray, Matcher


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
        The guess, and allowed tokens [len(drafted) + 1, V] bool, one row for each place that is verified.

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
        q = q[kept] if kept else None
    return Guesses(drafted.keep(kept), q), allowed
