"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state, each for one further token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import DraftRow, Guesses, Resources
from specdec_cli.drafters.feature_head import FeatureDrafter
from specdec_cli.drafters.growth import Growth
from specdec_cli.drafters.one_pass import grow_marginals

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.lm.heads.medusa import MedusaSequences


@dataclass
class Drafter(FeatureDrafter):
    """Guesses with published Medusa heads, chains or trees, as many tokens as there are heads.

    Args:
        model: hub id or folder of the heads.
    """

    model: str
    one_pass = True
    taps = ("final",)

    def __post_init__(self) -> None:
        """Refuse an empty name."""
        super().__init__(self.model)
        self._states: MedusaSequences | None = None

    @property
    def most_depth(self) -> int:
        """As many as there are heads."""
        return self._held.heads.config.num_heads

    @property
    def _held(self) -> MedusaSequences:
        assert self._states is not None, "a drafter is loaded before it drafts"
        return self._states

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
        self._states = self._sequences = MedusaSequences(MedusaHeads(config, target))
        self._num_tokens, self._max_context = resources.num_tokens, target.max_context

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """Up to k tokens per row, or a tree of that depth, as many as there are heads; all from one state."""
        most = self._max_context
        assert most is not None, "a drafter is loaded before it drafts"
        self._feed(rows)
        drafts = [Growth(row, place) for place, row in enumerate(rows) if self._held.can_draft(row.handle)]
        drafting = [draft for draft in drafts if draft.wants_more(most)]
        depths = {draft.place: min(draft.most_depth(most), self.most_depth) for draft in drafting}
        logits = self._held.logits([draft.row.handle for draft in drafting], list(depths.values()))
        grow_marginals(drafting, dict(zip(depths, logits, strict=True)), self._num_tokens, self._name)
        found = {draft.place: draft.guesses() for draft in drafts}
        return [found.get(place, Guesses()) for place in range(len(rows))]

    def path_logits(self, rows: Sequence[DraftRow], paths: Sequence[Sequence[int]]) -> list[Tensor]:
        """Each depth's logits, which are the same whatever the path."""
        self._feed(rows)
        return self._held.logits([row.handle for row in rows], [len(path) for path in paths])

    def _feed(self, rows: Sequence[DraftRow]) -> None:
        for row in rows:
            if row.features is not None:
                self._held.feed(row.handle, row.features)
