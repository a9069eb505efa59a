"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts k tokens in one pass, by masks behind the text.

The last kept position gives the first token. Each further one comes from a mask: a token and a state that were trained
for it stand for the token that is not drafted yet and for the target's states there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import DraftRow, Resources
from specdec_cli.drafters.layers_head import LayersDrafter
from specdec_cli.drafters.marginals import MarginalsDrafter

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.lm.heads.head import Head
    from specdec_cli.lm.heads.head_sequences import HeadSequences


@dataclass
class Drafter(MarginalsDrafter["HeadSequences"], LayersDrafter["HeadSequences"]):
    """Guesses with a published P-EAGLE head: k tokens cost one pass of it.

    Args:
        model: hub id or folder of the head.
        layers: target layers whose outputs it reads, counted from 0 and joined by dashes, such as 1-15-28; unset takes
            those that its configuration names.
    """

    def load_heads(self, resources: Resources) -> Sequence[Head]:
        """The P-EAGLE head."""
        from specdec_cli.lm.heads.p_eagle import PEagleHead

        assert resources.target is not None, "a head is loaded for a target"
        return [PEagleHead(self.config(resources.revision), resources.target)]

    def depth_logits(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> list[Tensor]:
        """Logits of the last kept position and of the masks behind it."""
        import torch

        logits = self.held.depth_logits([row.handle for row in rows], depths)
        return list(torch.split(logits, list(depths)))

    def _feed(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> None:
        news = [
            (row.handle, row.context, row.features, depth - 1)
            for row, depth in zip(rows, depths, strict=True)
            if row.features is not None
        ]
        self.held.feed([new[:3] for new in news], [new[3] for new in news])
