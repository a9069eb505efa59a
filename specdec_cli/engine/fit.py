"""Drafted tokens against a grammar: cut where nothing after them can be emitted, with the masks of what is verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specdec_cli.drafters.contract import Guesses
from specdec_cli.sampling.chain import LogitsError
from specdec_cli.sampling.grammar import GrammarError

if TYPE_CHECKING:
    from specdec_cli.sampling.grammar import BoolArray, Matcher


def fit(guesses: Guesses, matcher: Matcher, place: int) -> tuple[Guesses, BoolArray]:
    """Cut a guess at the first token that the grammar refuses.

    Where tokens were sampled from q the refused one stays, as the last: p is 0 there, so that it never stands, and the
    own token comes from what q leaves of p. To drop it because of its value would skip that correction and bias the
    output. Without chance, and where the mode compares with the target's own choice, dropping it changes nothing.

    Args:
        guesses: a drafted chain; may be empty.
        matcher: the sequence's place in its grammar.
        place: the row's place in the call, for the error.

    Returns:
        The guess, and allowed tokens [len(drafted) + 1, V] bool, one row for each place that is verified.

    Raises:
        LogitsError: the grammar cannot go on, so that no token is left.
    """
    assert guesses.drafted.is_chain, "a grammar follows a drafted chain"
    try:
        seen = matcher.look(guesses.drafted.tokens)
    except GrammarError as error:
        raise LogitsError(error.message, place, error.hint) from error
    num, allowed = seen.num_fitting, seen.allowed
    if guesses.q is not None and not seen.is_closed and num < len(guesses.drafted):
        # The position after a refused token is never used.
        num, allowed = num + 1, np.concatenate([allowed, np.ones_like(allowed[:1])])
    q = None if guesses.q is None or num == 0 else guesses.q[:num]
    return Guesses(guesses.drafted.first(num), q), allowed
