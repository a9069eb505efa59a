"""A draft model with some of its tokenizer's tokens alone, behind the LM's door of all of them.

A large vocabulary makes the output layer most of a small draft. `train-draft --method distill` can leave the rare
tokens out: the model's token i is then the i-th of a list in its configuration, the most frequent one first. A token
that is not in the list is read as the last one, the rarest, and never drafted, as in FR-Spec (arXiv 2502.14856).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from specdec_cli.errors import RunError
from specdec_cli.lm.door import CHAIN, DraftForm, Row
from specdec_cli.lm.files.names import DRAFT_TOKENS

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM, Continuations


def places_of(kept: Tensor, num_tokens: int) -> Tensor:
    """The model's own numbers [V] int64 of all tokens, when it has the tokens [D] int64; see the module."""
    places = torch.full((num_tokens,), len(kept) - 1)
    places[kept] = torch.arange(len(kept))
    return places


def over_all_tokens(lm: LM, kept: Any, num_tokens: int) -> LM:
    """A model behind the door of its tokenizer's vocabulary.

    Args:
        lm: the model.
        kept: the tokens that it has, as its configuration names them.
        num_tokens: V, of its tokenizer.

    Raises:
        RunError: they are not as many tokens as the model scores.
    """
    is_valid = isinstance(kept, list) and all(type(token) is int and token >= 0 for token in kept)
    if not is_valid or len(set(kept)) != len(kept) or len(kept) != lm.vocab_size:
        message = f"`{DRAFT_TOKENS}` in the configuration of `{lm.name}` are not {lm.vocab_size} tokens"
        raise RunError(message, "train the draft again, or copy it again")
    return cast("LM", ReducedLM(lm, kept, max(num_tokens, max(kept) + 1)))


class ReducedLM:
    """A model over all tokens of its tokenizer, of which it has some; what is not described here is the model's own.

    Args:
        own: the model.
        kept: the tokens that it has, in its own order.
        num_tokens: V.

    Attributes:
        vocab_size: V.
    """

    def __init__(self, own: LM, kept: Sequence[int], num_tokens: int) -> None:
        self.own, self.vocab_size, self._kept = own, num_tokens, list(kept)
        self._ids = torch.tensor(self._kept, device=own.device)
        self._places = {token: place for place, token in enumerate(self._kept)}

    def __getattr__(self, name: str) -> Any:
        """Anything else of the model, as it is now: its cache is planned after it was loaded."""
        if name == "own":
            raise AttributeError(name)
        return getattr(self.own, name)

    def score(self, rows: Sequence[Row]) -> Tensor:
        """Logits [sum of num_logits, V] float32 as `LM.score` gives them; minus infinity for tokens that it lacks."""
        logits = self.own.score([self._own_row(row) for row in rows])
        spread = torch.full((len(logits), self.vocab_size), -inf, device=logits.device)
        return spread.index_copy_(1, self._ids, logits)

    def guess(self, rows: Sequence[Row], _num_tokens: int, form: DraftForm = CHAIN) -> Continuations | None:
        """As `LM.guess`, of chains of likeliest tokens that the host knows; None where rows are drawn, or on a GPU."""
        if self.own.device.type != "cpu" or form != CHAIN or any(row.draw is not None for row in rows):
            return None
        found = self.own.guess([self._own_row(row) for row in rows], len(self._kept))
        return found and replace(found, tokens=[[self._kept[token] for token in tokens] for tokens in found.tokens])

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """As `LM.adopt`."""
        return self.own.adopt(handle, self._own_tokens(context), salt)

    def _own_row(self, row: Row) -> Row:
        drafted = row.drafted.with_tokens(self._own_tokens(row.drafted.tokens))
        return replace(row, context=self._own_tokens(row.context), drafted=drafted)

    def _own_tokens(self, tokens: Sequence[int]) -> list[int]:
        places, rarest = self._places, len(self._kept) - 1
        return [places.get(token, rarest) for token in tokens]
