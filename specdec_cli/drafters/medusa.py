"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state, each for one further token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import DraftRow, Resources
from specdec_cli.drafters.marginals import MarginalsDrafter

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.lm.heads.medusa import MedusaSequences


@dataclass
class Drafter(MarginalsDrafter["MedusaSequences"]):
    """Guesses with published Medusa heads, chains or trees, as many tokens as there are heads.

    Args:
        model: hub id or folder of the heads.
    """

    model: str
    taps = ("final",)

    def __post_init__(self) -> None:
        """Refuse an empty name."""
        super().__init__(self.model)

    def load(self, resources: Resources) -> None:
        """Load the heads.

        Raises:
            RunError: their files are missing or broken.
            UsageError: they were made for another target, or tensors are missing or of other shapes.
        """
        from specdec_cli.lm.heads.medusa import MedusaHeads, MedusaSequences
        from specdec_cli.lm.heads.medusa_files import MedusaConfig

        target = resources.target
        assert target is not None, "heads are loaded for a target"
        config = self.published(resources.revision)
        assert isinstance(config, MedusaConfig), "the format that has the method has its configuration"
        self.hold(MedusaSequences(MedusaHeads(config, target)), resources)

    def depth_logits(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> list[Tensor]:
        """Logits of as many heads."""
        return self.held.logits([row.handle for row in rows], depths)

    def _feed(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> None:
        for row in rows:
            if row.features is not None:
                self.held.feed(row.handle, row.features)
