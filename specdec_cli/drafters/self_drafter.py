"""Base of drafters that guess with the target's own weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from specdec_cli.drafters.contract import Resources
from specdec_cli.drafters.language_model import LMDrafter

if TYPE_CHECKING:
    from specdec_cli.lm.cache.budget import DraftCache
    from specdec_cli.lm.door import LM
    from specdec_cli.lm.self_draft import SelfDraft


class SelfDrafter(LMDrafter):
    """Guesses with a language model that is made of the target, on a cache of its own.

    The draft files its keys and values beside the target's, never among them. So nothing that it computes, for guesses
    that may be refused, is ever read by the target, and each promise about the target's output holds as it does with
    any draft model: trees, preempted sequences and reused prefixes included. The price is a prefill of its own.
    """

    def __init__(self, self_draft: SelfDraft) -> None:
        super().__init__(self_draft.spec)
        self._self_draft = self_draft

    @property
    def self_drafts(self) -> Sequence[SelfDraft]:
        """The one that it guesses with."""
        return (self._self_draft,)

    def load_lm(self, resources: Resources) -> LM:
        """The draft, made of the loaded target.

        Raises:
            UsageError: it cannot be made of this target.
        """
        assert resources.target is not None, "a draft is made of a loaded target"
        lm = resources.target.self_draft(self._self_draft)
        resources.plan_cache(cast("DraftCache", lm))
        return lm
