"""Draft vocabularies: a head that scores fewer tokens than its target has, and which ones (`d2t`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.lm.heads.published import PublishedDraft


def target_ids(config: PublishedDraft, tensors: Mapping[str, Tensor], target: str, vocab_size: int) -> Tensor | None:
    """The target's id of each drafted token [drafted tokens] int64; None where all are drafted by the target's ids.

    Args:
        config: of the draft.
        tensors: the draft's, by common names.
        target: its name, for messages.
        vocab_size: V, the width of its logits.

    Raises:
        UsageError: the ids are not the target's.
    """
    ids = config.drafted_ids(tensors)
    if ids is None:
        return None
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) != len(ids):
        said = f"the draft `{config.name}` drafts tokens that `{target}` does not have, or has twice"
        raise UsageError(f"{said}, by its tensor `{config.ids_tensor}`", "choose a draft that was made for this target")
    return ids


def offset_ids(offsets: Tensor) -> Tensor:
    """The target's id of each drafted token, of how much larger it is than the draft's (`d2t`)."""
    return torch.arange(len(offsets), device=offsets.device) + offsets.long()


def spread(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits [n, V] of the target's tokens: -inf for those that the draft has not."""
    if ids is None:
        return logits
    wide = logits.new_full((len(logits), vocab_size), -torch.inf)
    wide[:, ids] = logits
    return wide
