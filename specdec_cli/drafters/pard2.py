"""PARD-2 (arXiv 2605.08632): PARD that also reads hidden states of the target; it drafts k tokens in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from shlex import quote
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import DraftRow, Resources
from specdec_cli.drafters.feature_head import HeadDrafter
from specdec_cli.drafters.marginals import MarginalsDrafter
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.lm.door import Tap
    from specdec_cli.lm.heads.pard2 import Pard2Sequences


@dataclass
class Drafter(MarginalsDrafter["Pard2Sequences"], HeadDrafter["Pard2Sequences"]):
    """Guesses with a PARD-2 draft.

    Args:
        model: hub id or folder of the draft.
        layers: hidden states of the target that it reads, joined by dashes: `final`, or a layer, counted from 0, whose
            output it is, such as final-28-20-12; unset takes those that its configuration names.
    """

    model: str
    layers: str | None = None
    has_tokenizer = True

    def __post_init__(self) -> None:
        """Refuse an empty name, and layers that are none."""
        super().__init__(self.model)
        parts = [] if self.layers is None else self.layers.split("-")
        if not all(part.isdecimal() or part == "final" for part in parts):
            raise UsageError(f"`layers` must be joined by dashes, such as final-28-20-12, not `{self.layers}`")

    @cached_property
    def taps(self) -> Sequence[Tap]:
        """The hidden states.

        Raises:
            UsageError: the option does not name them.
        """
        if self.layers is None:
            said = f"which of the target's layers the draft `{self.model}` reads depends on the target"
            raise UsageError(said, f"name them: `--draft {quote(f'pard2:model={self.model},layers=final-28-20-12')}`")
        return tuple("final" if part == "final" else int(part) for part in self.layers.split("-"))

    def load_sequences(self, resources: Resources) -> Pard2Sequences:
        """The sequences of the draft.

        Raises:
            RunError: its files are missing, broken, or of other shapes.
            UsageError: it was made for another target, or scores fewer tokens than the target's tokenizer has.
        """
        from specdec_cli.lm.heads.pard2 import Pard2Head, Pard2Sequences
        from specdec_cli.lm.heads.pard2_files import Pard2Config

        target = resources.target
        assert target is not None, "a head is loaded for a target"
        config = self.published(resources.revision)
        assert isinstance(config, Pard2Config), "the format that has the method has its configuration"
        if len(self.taps) != len(config.places):
            said = f"the draft `{self.model}` reads {len(config.places)} hidden states"
            raise UsageError(f"{said}, and `layers` names {len(self.taps)}", "leave `layers` out")
        head = Pard2Head(config, target)
        if head.vocab_size < resources.num_tokens:
            said = f"the draft `{self.model}` scores {head.vocab_size} tokens, the target has {resources.num_tokens}"
            raise UsageError(said, "choose a draft with the target's tokenizer")
        return Pard2Sequences(head, target, self.model)

    def depth_logits(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> list[Tensor]:
        """Logits of the last token and of the masks behind it."""
        ends = [(row.handle, row.context[-1], depth) for row, depth in zip(rows, depths, strict=True)]
        return self.held.logits_behind(ends) if ends else []
