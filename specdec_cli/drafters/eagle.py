"""EAGLE 1 and 2 (Li et al. 2024, arXiv 2401.15077): a one-layer head on the target's final hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.drafters.chain_head import ChainDrafter
from specdec_cli.drafters.contract import Resources

if TYPE_CHECKING:
    from specdec_cli.lm.heads.head import Head


@dataclass
class Drafter(ChainDrafter):
    """Guesses with a published EAGLE head, chains or trees (EAGLE-2's are `--tree dynamic:N`).

    Args:
        model: hub id or folder of the head.
    """

    model: str
    taps = ("final",)

    def __post_init__(self) -> None:
        """Refuse an empty name."""
        super().__init__(self.model)

    def load_heads(self, resources: Resources) -> Sequence[Head]:
        """The EAGLE head."""
        from specdec_cli.lm.heads.eagle import EagleHead
        from specdec_cli.lm.heads.eagle_files import HeadConfig

        assert resources.target is not None, "a head is loaded for a target"
        config = self.published(resources.revision)
        assert isinstance(config, HeadConfig), "the format that has the method has its configuration"
        return [EagleHead(config, resources.target)]
