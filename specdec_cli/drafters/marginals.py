"""Base of drafters whose distributions all come from one pass, each depth's the same whatever stands before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import DraftRow
from specdec_cli.drafters.feature_head import FeatureDrafter, S
from specdec_cli.drafters.growth import Growth
from specdec_cli.drafters.one_pass import grow_marginals

if TYPE_CHECKING:
    from torch import Tensor


class MarginalsDrafter(FeatureDrafter[S]):
    """Guesses every depth from its own distribution.

    Args:
        model: hub id or folder of the draft.
    """

    one_pass = True

    def path_logits(self, rows: Sequence[DraftRow], paths: Sequence[Sequence[int]]) -> list[Tensor]:
        """Each depth's logits, which are the same whatever the path."""
        depths = [len(path) for path in paths]
        self._feed(rows, depths)
        return self.depth_logits(rows, depths)

    def depth_logits(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> list[Tensor]:
        """Logits [depth, V] float32 of each row's next tokens; its features were fed."""
        raise NotImplementedError

    def _grow(self, drafting: Sequence[Growth], depths: Mapping[int, int]) -> None:
        logits = self.depth_logits([draft.row for draft in drafting], [depths[draft.place] for draft in drafting])
        by_place = {draft.place: its for draft, its in zip(drafting, logits, strict=True)}
        grow_marginals(drafting, by_place, self._num_tokens, self._name)
