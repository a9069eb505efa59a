"""PARD-2 (arXiv 2605.08632): PARD that also reads hidden states of the target; it drafts k tokens in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from shlex import quote
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import DraftRow, Guesses, Resources
from specdec_cli.drafters.feature_head import HeadDrafter
from specdec_cli.drafters.growth import Growth
from specdec_cli.drafters.one_pass import grow_marginals
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.lm.door import Tap
    from specdec_cli.lm.heads.pard2 import Pard2Sequences


@dataclass
class Drafter(HeadDrafter):
    """Guesses with a PARD-2 draft.

    Args:
        model: hub id or folder of the draft.
        layers: hidden states of the target that it reads, joined by dashes: `final`, or a layer, counted from 0, whose
            output it is, such as final-28-20-12; unset takes those that its configuration names.
    """

    model: str
    layers: str | None = None
    one_pass = True
    has_tokenizer = True
    most_depth = None

    def __post_init__(self) -> None:
        """Refuse an empty name, and layers that are none."""
        super().__init__(self.model)
        parts = [] if self.layers is None else self.layers.split("-")
        if not all(part.isdecimal() or part == "final" for part in parts):
            raise UsageError(f"`layers` must be joined by dashes, such as final-28-20-12, not `{self.layers}`")
        self._rows: Pard2Sequences | None = None

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

    def load(self, resources: Resources) -> None:
        """Load the draft.

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
        self._rows = self._sequences = Pard2Sequences(head, target, self.model)
        resources.plan_cache(self._rows)
        self._num_tokens, self._max_context = resources.num_tokens, target.max_context

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """Up to k tokens per row, or a tree of that depth; all from one pass."""
        held, most = self._feed(rows), self._max_context
        assert most is not None, "a drafter is loaded before it drafts"
        drafts = [Growth(row, place) for place, row in enumerate(rows) if held.can_draft(row.handle)]
        drafting = [draft for draft in drafts if draft.wants_more(most)]
        depths = {draft.place: draft.most_depth(most) for draft in drafting}
        logits = self._logits([draft.row for draft in drafting], list(depths.values()))
        by_place = dict(zip(depths, logits, strict=True))
        grow_marginals(drafting, by_place, self._num_tokens, self._name)
        found = {draft.place: draft.guesses() for draft in drafts}
        return [found.get(place, Guesses()) for place in range(len(rows))]

    def path_logits(self, rows: Sequence[DraftRow], paths: Sequence[Sequence[int]]) -> list[Tensor]:
        """Each depth's logits, which are the same whatever the path."""
        self._feed(rows)
        return self._logits(rows, [len(path) for path in paths])

    def _feed(self, rows: Sequence[DraftRow]) -> Pard2Sequences:
        assert self._rows is not None, "a drafter is loaded before it drafts"
        self._rows.feed([(row.handle, row.context, row.features) for row in rows if row.features is not None])
        return self._rows

    def _logits(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> list[Tensor]:
        assert self._rows is not None, "a drafter is loaded before it drafts"
        ends = [(row.handle, row.context[-1], depth) for row, depth in zip(rows, depths, strict=True)]
        return self._rows.logits_behind(ends) if ends else []
