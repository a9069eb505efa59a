"""Growth of guesses whose distributions all come from one pass of the draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from specdec_cli.drafters.growth import Growth
from specdec_cli.drafters.rounds import grow_deeper

if TYPE_CHECKING:
    from torch import Tensor


def grow_whole(
    drafts: Sequence[Growth],
    depths: Mapping[int, int],
    logits: Callable[[Sequence[Growth]], Tensor],
    num_tokens: int,
    name: str,
    confidence: Callable[[Sequence[Growth]], Tensor] | None = None,
) -> None:
    """Grow guesses to their full depth.

    A chain takes a token from each depth. A tree's nodes of one depth have their children from the same distribution,
    or from those behind their own tokens. The sampling settings are applied along each path, so that q is the
    distribution that a node was drawn from, penalties included.

    Args:
        drafts: the guesses.
        depths: of each guess by its place, how deep it may grow.
        logits: of the next depth of guesses, [ends, V] float32, which stays unchanged.
        num_tokens: V, the real vocabulary.
        name: of the draft, for messages.
        confidence: how sure the draft is of the next depth, [ends]; None goes by the largest probability.

    Raises:
        LogitsError: a row has no distribution at its first token.
    """
    while growing := [one for one in drafts if not one.is_done and one.depth < depths[one.place]]:
        sure = None if confidence is None else confidence(growing)
        grow_deeper(growing, logits(growing), num_tokens, name, sure)


def rows_at(growing: Sequence[Growth], rows: Mapping[int, Tensor]) -> Tensor:
    """The row of each guess's next depth, for every end.

    Args:
        growing: the guesses.
        rows: of each by its place, [depth, width].

    Returns:
        Rows [ends, width]; a view where there is one guess with one end.
    """
    import torch

    found = [rows[one.place][one.depth].expand(one.num_ends, -1) for one in growing]
    return found[0] if len(found) == 1 else torch.cat(found)
