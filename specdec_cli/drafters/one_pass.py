"""Growth of guesses whose distributions all come from one pass: each depth has its own, whatever stands before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specdec_cli.drafters.growth import Growth
from specdec_cli.drafters.rounds import grow_deeper

if TYPE_CHECKING:
    from torch import Tensor


def grow_whole(drafts: Sequence[Growth], logits: Mapping[int, Tensor], num_tokens: int, name: str) -> None:
    """Grow guesses as deep as their logits reach.

    A chain takes a token from each depth. A tree's nodes of one depth have their children from the same distribution:
    siblings differ, cousins may be alike. The sampling settings are applied along each path, so that q is what a node
    was drawn from, penalties included.

    Args:
        drafts: the guesses.
        logits: of each guess by its place, [depth, V] float32; left unchanged.
        num_tokens: V, the real vocabulary.
        name: of the draft, for messages.

    Raises:
        LogitsError: a row has no distribution at its first token.
    """
    import torch

    while growing := [one for one in drafts if not one.is_done and one.depth < len(logits[one.place])]:
        depths = [logits[one.place][one.depth].expand(one.num_ends, -1) for one in growing]
        grow_deeper(growing, depths[0] if len(depths) == 1 else torch.cat(depths), num_tokens, name)
