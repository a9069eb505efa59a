"""Base of drafters that guess with a language model, sampled as the target will be (Leviathan et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import DraftRow, Guesses, Resources, WithoutFeatures
from specdec_cli.drafters.growing_draft import GrowingDraft, check_guess, draw_of, grow_deeper, take_chains
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.lm.cache.pending_tokens import PendingTokens
    from specdec_cli.lm.door import LM

_CHUNK = 512  # tokens of an unseen context per forward, so that a long prompt's activations stay small


class LMDrafter(WithoutFeatures):
    """Guesses with a language model: in one call where it has one for that, else round by round over all rows.

    Args:
        name: of the draft, for messages.
    """

    draws = True
    has_tokenizer = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._loaded: LM | None = None
        self._num_tokens = 0
        self._num_fed: dict[int, int] = {}
        self._unread: PendingTokens | None = None

    @property
    def lm(self) -> LM:
        """The loaded draft model."""
        assert self._loaded is not None, "a drafter is loaded before it drafts"
        return self._loaded

    @property
    def max_context(self) -> int | None:
        """Longest context that the draft model reads."""
        return self.lm.max_context

    @property
    def builds_trees(self) -> bool:
        """Whether the draft model scores trees."""
        return self.lm.scores_trees

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Of the draft model and its KV cache."""
        return self.lm.num_parameters, self.lm.num_bytes

    def load(self, resources: Resources) -> None:
        """Load the language model.

        Raises:
            UsageError: it scores fewer tokens than the target's tokenizer has.
        """
        self._loaded = self.load_lm(resources)
        self._num_tokens = resources.num_tokens
        if self.lm.vocab_size < self._num_tokens:
            message = f"the draft `{self._name}` scores {self.lm.vocab_size} tokens, the target has {self._num_tokens}"
            raise UsageError(message, "choose a draft with the target's tokenizer")

    def load_lm(self, resources: Resources) -> LM:
        """The language model of this method."""
        raise NotImplementedError

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """Up to k tokens per row, or a tree of that depth; of rows not guessed in one call, one depth each round.

        Raises:
            RunError: what it guessed before, unread, was no token.
        """
        self._check_last_guess()
        drafts, most = self.begin(rows), self.lm.max_context
        self._guess([draft for draft in drafts if draft.wants_more(most) and draft.is_plain])
        while growing := [draft for draft in drafts if draft.wants_more(most)]:
            logits = self.lm.score([draft.to_score() for draft in growing])
            grow_deeper(growing, logits, self._num_tokens, self._name)
        return [draft.guesses() for draft in drafts]

    def begin(self, rows: Sequence[DraftRow]) -> list[GrowingDraft]:
        """The rows' guesses before their first token; all of each context but a chunk is in the cache then."""
        for row in rows:
            if row.cache_salt is not None and row.handle not in self._num_fed:
                self._num_fed[row.handle] = self.lm.adopt(row.handle, row.context, row.cache_salt)
        drafts = [GrowingDraft(row, place) for place, row in enumerate(rows)]
        self._feed_long_contexts([draft for draft in drafts if draft.wants_more(self.lm.max_context)])
        return drafts

    def release(self, handle: int) -> None:
        """Forget a sequence, and have the draft model forget it."""
        self._num_fed.pop(handle, None)
        if self._loaded is not None:
            self._loaded.release(handle)

    def _check_last_guess(self) -> None:
        """A guess that was not read when it was made is known by now."""
        unread, self._unread = self._unread, None
        check_guess(unread, self._name, "try --draft-dtype float32, or another checkpoint if it is float32 already")

    def _feed_long_contexts(self, drafts: Sequence[GrowingDraft]) -> None:
        """Fill the cache chunk by chunk until at most one chunk of each context is unseen."""
        from specdec_cli.lm.door import Row

        fed = self._num_fed
        while long := [d.row for d in drafts if len(d.row.context) - fed.get(d.row.handle, 0) > _CHUNK]:
            for row in long:
                fed[row.handle] = fed.get(row.handle, 0) + _CHUNK
            self.lm.score([Row(row.handle, row.context[: fed[row.handle]], num_logits=0) for row in long])
        for draft in drafts:
            fed[draft.row.handle] = len(draft.row.context)

    def _guess(self, drafts: Sequence[GrowingDraft]) -> None:
        """Guess for plain rows in one call, where the LM has one for it."""
        from specdec_cli.lm.door import Row

        counts = [draft.most_depth(self.lm.max_context) for draft in drafts]
        rows = [
            Row(draft.row.handle, draft.row.context, num, draw=draw_of(draft.row, num))
            for draft, num in zip(drafts, counts, strict=True)
        ]
        found = self.lm.guess(rows, self._num_tokens) if rows else None
        if found is not None:
            self._unread = found.unread
            take_chains(drafts, found)
