"""The promise of a verification mode about the output, known without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec_cli.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Promise:
    """The promise of a verification mode.

    Args:
        verify: the mode, resolved.
        is_lossless: whether its output follows the target's distribution.
        keeps_tokens: whether its output is, token for token, that of decoding without a draft.
    """

    verify: str
    is_lossless: bool
    keeps_tokens: bool = False

    @classmethod
    def of(cls, recipe: Recipe) -> Promise:
        """The promise of a recipe's mode at its temperature: at 0 `typical` verifies greedily, too."""
        from specdec_cli.verification import resolve_mode, rule_of

        asked = recipe.speculation.verify, recipe.sampling.temperature
        rule = rule_of(*asked)
        return cls(resolve_mode(*asked), rule.is_lossless, rule.keeps_tokens)
