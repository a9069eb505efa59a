"""Draft vocabularies: a head that scores fewer tokens than its target has, and which ones (`d2t`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM


def target_ids(name: str, offsets: Tensor | None, target: LM) -> Tensor | None:
    """The target's id of each drafted token: `d2t` holds how much larger it is than the draft's.

    Args:
        name: of the head, for messages.
        offsets: [drafted tokens] int64; None where it drafts all tokens by the target's ids.
        target: whose ids they are.

    Raises:
        UsageError: the ids are not the target's.
    """
    if offsets is None:
        return None
    ids = torch.arange(len(offsets), device=offsets.device) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or len(set(ids.tolist())) != len(ids):
        said = f"`d2t` of the draft head `{name}` leads to tokens that `{target.name}` does not have, or has twice"
        raise UsageError(said, "choose a draft that was made for this target")
    return ids


def spread(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits [n, V] of the target's tokens: -inf for those that the draft has not."""
    if ids is None:
        return logits
    wide = logits.new_full((len(logits), vocab_size), -torch.inf)
    wide[:, ids] = logits
    return wide
