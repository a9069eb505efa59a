"""No draft: proposes nothing, so that plain decoding is no second path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_cli.drafters.contract import DraftRow, Guesses, Resources, WithoutModel


@dataclass
class Drafter(WithoutModel):
    """Guesses nothing."""

    def load(self, resources: Resources) -> None:
        """Nothing to make ready."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """An empty guess for every row."""
        return [Guesses() for _ in rows]

    def release(self, handle: int) -> None:
        """Nothing to forget."""
