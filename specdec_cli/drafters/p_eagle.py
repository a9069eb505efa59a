"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts k tokens in one pass, by masks behind the text.

The last kept position gives the first token. Each further one comes from a mask: a token and a state that were trained
for it stand for the token that is not drafted yet and for the target's states there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import DraftRow, Guesses, Resources
from specdec_cli.drafters.growth import Growth
from specdec_cli.drafters.layers_head import LayersDrafter
from specdec_cli.drafters.one_pass import grow_marginals

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.lm.heads.head import Head


@dataclass
class Drafter(LayersDrafter):
    """Guesses with a published P-EAGLE head: k tokens cost one pass of it.

    Args:
        model: hub id or folder of the head.
        layers: target layers whose outputs it reads, counted from 0 and joined by dashes, such as 1-15-28; unset takes
            those that its configuration names.
    """

    one_pass = True

    def load_heads(self, resources: Resources) -> Sequence[Head]:
        """The P-EAGLE head."""
        from specdec_cli.lm.heads.p_eagle import PEagleHead

        assert resources.target is not None, "a head is loaded for a target"
        return [PEagleHead(self.config(resources.revision), resources.target)]

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """Up to k tokens per row, or a tree of that depth, all of them from one pass."""
        self._feed(rows, [row.k for row in rows])
        held, most = self.loaded
        drafts = [Growth(row, place) for place, row in enumerate(rows) if held.can_draft(row.handle)]
        growing = [draft for draft in drafts if draft.wants_more(most)]
        depths = {draft.place: draft.most_depth(most) for draft in growing}
        if growing:
            logits = self._logits([draft.row for draft in growing], list(depths.values()))
            each = dict(zip(depths, logits, strict=True))
            grow_marginals(growing, each, self._num_tokens, self._name)
        found = {draft.place: draft.guesses() for draft in drafts}
        return [found.get(place, Guesses()) for place in range(len(rows))]

    def path_logits(self, rows: Sequence[DraftRow], paths: Sequence[Sequence[int]]) -> list[Tensor]:
        """Each depth's logits, which are the same whatever the path."""
        depths = [len(path) for path in paths]
        self._feed(rows, depths)
        return self._logits(rows, depths)

    def _feed(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> None:
        news = [
            (row.handle, row.context, row.features, depth - 1)
            for row, depth in zip(rows, depths, strict=True)
            if row.features is not None
        ]
        self.loaded[0].feed([new[:3] for new in news], [new[3] for new in news])

    def _logits(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> list[Tensor]:
        """Logits [depth, V] float32 of each row's next tokens."""
        import torch

        logits = self.loaded[0].depth_logits([row.handle for row in rows], depths)
        return list(torch.split(logits, list(depths)))
