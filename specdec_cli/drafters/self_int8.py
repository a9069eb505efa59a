"""Self-speculation with an int8 copy of the target, which reads half or a quarter of the bytes for each token."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_cli.drafters.self_drafter import SelfDrafter
from specdec_cli.lm.self_draft import SelfDraft


@dataclass
class Drafter(SelfDrafter):
    """Guesses with an int8 copy of the target's linear layers, made when the target is loaded; no second model."""

    def __post_init__(self) -> None:
        """It has no options."""
        super().__init__(SelfDraft(quantize="int8"))
