"""Self-speculation with an early exit (LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710): the first layers draft."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_cli.drafters.self_drafter import SelfDrafter
from specdec_cli.errors import UsageError
from specdec_cli.lm.self_draft import SelfDraft


@dataclass
class Drafter(SelfDrafter):
    """Guesses with the target's first layers, its final norm and its output layer; no second model.

    Args:
        layers: how many first layers draft, fewer than the target has.
    """

    layers: int

    def __post_init__(self) -> None:
        """Refuse fewer than one layer."""
        if self.layers < 1:
            raise UsageError(f"`layers` must be at least 1, not `{self.layers}`", "for example `--draft self-exit:4`")
        super().__init__(SelfDraft(layers=self.layers))
