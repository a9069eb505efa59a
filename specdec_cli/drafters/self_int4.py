"""Self-speculation with a 4-bit copy of the target, which reads a third to a sixth of the bytes for each token."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_cli.drafters.self_drafter import SelfDrafter
from specdec_cli.lm.self_draft import SelfDraft


@dataclass
class Drafter(SelfDrafter):
    """Guesses with a copy of the target's linear layers in blocks of 4 bits, made at load; no second model."""

    def __post_init__(self) -> None:
        """It has no options."""
        super().__init__(SelfDraft(quantize="int4"))
