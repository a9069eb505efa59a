"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a small head on hidden states of several target layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.drafters.chain_head import ChainDrafter
from specdec_cli.drafters.contract import Resources
from specdec_cli.drafters.layers_head import LayersDrafter

if TYPE_CHECKING:
    from specdec_cli.lm.heads.chain_sequences import ChainSequences
    from specdec_cli.lm.heads.head import Head


@dataclass
class Drafter(ChainDrafter, LayersDrafter["ChainSequences"]):
    """Guesses with a published EAGLE-3 head.

    Args:
        model: hub id or folder of the head.
        layers: target layers whose outputs it reads, counted from 0 and joined by dashes, such as 1-15-28; unset takes
            those that its configuration names.
    """

    def load_heads(self, resources: Resources) -> Sequence[Head]:
        """The EAGLE-3 head."""
        from specdec_cli.lm.heads.eagle import Eagle3Head

        assert resources.target is not None, "a head is loaded for a target"
        return [Eagle3Head(self.config(resources.revision), resources.target)]
