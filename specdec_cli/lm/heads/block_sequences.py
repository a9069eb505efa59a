"""The sequences of a block draft: its context's keys and values in every layer, and a block behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec_cli.lm.cache.cache_plan import CacheNeed
from specdec_cli.lm.heads.block_head import BlockHead
from specdec_cli.lm.heads.head_layer import LayerFeed
from specdec_cli.lm.heads.head_sequences import HeadSequences

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM


class BlockSequences(HeadSequences):
    """Runs a block draft over sequences. A block is always whole, as in training, however few tokens are wanted.

    Args:
        head: loaded.
        target: as for `HeadSequences`.
        name: of the draft, for messages.

    Attributes:
        head: the draft.
    """

    def __init__(self, head: BlockHead, target: LM, name: str) -> None:
        super().__init__([head], target, name)
        self.head = head

    @property
    def most_tokens(self) -> int:
        """As many as a block gives."""
        return self.head.config.most_tokens

    def draft_cache_need(self, num_seqs: int, num_drafted: int, target_context: int) -> CacheNeed:
        """With room for a whole block of each sequence."""
        return super().draft_cache_need(num_seqs, max(num_drafted, self.head.config.block_size), target_context)

    @torch.inference_mode()
    def blocks(self, anchors: Sequence[tuple[int, int]]) -> Tensor:
        """States [sequences, tokens of a block, hidden] of the rows that give a token.

        Args:
            anchors: of each sequence its handle, whose features were fed, and its last token.

        Raises:
            RunError: too few blocks are free.
        """
        size, feeds = self.head.config.block_size, []
        for handle, _ in anchors:
            held = self.cache.of(handle)
            first, end = held.num_kept, held.num_kept + size
            self.cache.reserve(held, end)
            feeds.append(LayerFeed(self.cache.keys, self.cache.values, held.slots, range(first, end), end))
        rows = self.head.rows([token for _, token in anchors], feeds)
        return rows if self.head.config.from_anchor else rows[:, 1:]
