"""PARD (An et al. 2025, arXiv 2504.18583): a language model that drafts k tokens in one pass, by mask tokens.

It reads the context and k - 1 mask tokens behind it. The last real token's row gives the first drafted token, each mask
row one more. The masks stand behind the context as drafted nodes, so that their keys and values go with the next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.drafted import Drafted
from specdec_cli.drafters.contract import DraftRow, Resources
from specdec_cli.drafters.growing_draft import GrowingDraft, grow_marginals
from specdec_cli.drafters.language_model import LMDrafter
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.lm.door import LM
    from specdec_cli.lm.files.origin import Origin
    from specdec_cli.lm.heads.published import PublishedDraft


@dataclass
class Drafter(LMDrafter):
    """Guesses with a PARD draft: k tokens cost one forward of the draft.

    Args:
        model: hub id or folder of the draft.
    """

    model: str
    one_pass = True
    builds_trees = True

    def __post_init__(self) -> None:
        """Refuse an empty name."""
        if not self.model.strip():
            raise UsageError("`model` of the draft is empty", "name the hub id or the folder of a PARD draft")
        super().__init__(self.model)
        self.source: PublishedDraft | None = None  # what the folder says, where it was read

    def load_lm(self, resources: Resources) -> LM:
        """The language model; its configuration names the mask token.

        Raises:
            UsageError: the folder holds no PARD draft.
        """
        from specdec_cli.lm.heads.pard import PardDraft
        from specdec_cli.lm.heads.published import read_published

        published = self.source or read_published(self.model, resources.revision, method="pard")
        assert isinstance(published, PardDraft), "the format that has the method"
        self._mask = published.mask_token
        return resources.load_lm(self.model)

    @property
    def origin(self) -> Origin:
        """Where the language model comes from."""
        return self.lm.origin

    def forced_lm(self, temperature: float) -> LM | None:
        """None: its distributions depend on where a step begins."""
        return None

    def _grow(self, drafts: Sequence[GrowingDraft]) -> None:
        """Grow guesses to their full depth, all from one forward."""
        most = self.lm.max_context
        drafting = [draft for draft in drafts if draft.wants_more(most)]
        logits = self._logits([draft.row for draft in drafting], [draft.row.most_depth(most) for draft in drafting])
        by_place = dict(zip((draft.place for draft in drafting), logits, strict=True))
        grow_marginals(drafting, by_place, self._num_tokens, self._name)

    def path_logits(self, rows: Sequence[DraftRow], paths: Sequence[Sequence[int]]) -> list[Tensor]:
        """Each depth's logits, which are the same whatever the path."""
        self.read_contexts(rows)
        return self._logits(rows, [len(path) for path in paths])

    def _logits(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> list[Tensor]:
        """Logits [depth, V] float32 of each row's next tokens."""
        import torch

        from specdec_cli.lm.door import Row

        if not rows:
            return []
        assert self._mask is not None, "a drafter is loaded before it drafts"
        masks = [Drafted.chain([self._mask] * (depth - 1)) for depth in depths]
        scored = [
            Row(row.handle, row.context, depth, drafted)
            for row, depth, drafted in zip(rows, depths, masks, strict=True)
        ]
        return list(torch.split(self.lm.score(scored), list(depths)))
