"""A draft model: any smaller causal LM, read from a folder or the hub."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import Resources
from specdec_cli.drafters.language_model import LMDrafter
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM


@dataclass
class Drafter(LMDrafter):
    """Guesses with a smaller language model.

    Args:
        model: hub id, folder or built-in name of the draft.
    """

    model: str

    def __post_init__(self) -> None:
        """Refuse an empty name."""
        if not self.model.strip():
            raise UsageError("`model` of the draft is empty", "name a hub id, a folder or a built-in")
        super().__init__(self.model)

    def load_lm(self, resources: Resources) -> LM:
        """The draft model."""
        return resources.load_lm(self.model)
