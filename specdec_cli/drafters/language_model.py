"""Base of drafters that guess with a language model, sampled as the target will be (Leviathan et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import DraftRow, Guesses, Resources, WithoutFeatures, by_shape, draws_of
from specdec_cli.drafters.growing_draft import GrowingDraft, grow_deeper
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.lm.cache.pending_tokens import PendingTokens
    from specdec_cli.lm.door import LM
    from specdec_cli.lm.forward.device_drafts import DraftOnDevice

_CHUNK = 512  # tokens of an unseen context per forward, so that a long prompt's activations stay small


class LMDrafter(WithoutFeatures):
    """Guesses with a language model: plain rows in one call where it has one for that, else a depth each round.

    Attributes:
        on_device: as `DraftsOnDevice` has it.
    """

    draws = True
    has_tokenizer = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._loaded: LM | None = None
        self._num_tokens = 0
        self._num_fed: dict[int, int] = {}
        self._mask: int | None = None  # stands for tokens that come from one pass
        self._unread: list[PendingTokens] = []
        self.on_device: DraftOnDevice | None = None

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
        """Up to k tokens per row, or a tree of that depth; of rows not continued in one call, one depth each round.

        Raises:
            RunError: what it guessed before, unread, was no token.
        """
        for unread in self._unread:
            unread.check(self._name, "try --draft-dtype float32, or another checkpoint if it is float32 already")
        self._unread.clear()
        self.on_device = None
        self.read_contexts(rows)
        guesses = self._continue_plain(rows)
        if drafts := [GrowingDraft(row, place) for place, row in enumerate(rows) if place not in guesses]:
            self._grow(drafts)
            guesses |= {draft.place: draft.guesses() for draft in drafts}
        return [guesses[place] for place in range(len(rows))]

    def follow(self, contexts: Mapping[int, Sequence[int]], unread: PendingTokens) -> None:
        """Take note of a round that the device has drafted; see `DraftsOnDevice`."""
        self._num_fed |= {handle: len(context) for handle, context in contexts.items()}
        if not unread.is_whole:
            self._unread.append(unread)

    def _grow(self, drafts: Sequence[GrowingDraft]) -> None:
        """Grow guesses one depth each round."""
        while growing := [draft for draft in drafts if draft.wants_more(self.lm.max_context)]:
            logits = self.lm.score([draft.to_score() for draft in growing])
            grow_deeper(growing, logits, self._num_tokens, self._name)

    def read_contexts(self, rows: Sequence[DraftRow]) -> None:
        """Put all of each context but its last chunk into the cache; a new row takes over the prefix that is cached."""
        from specdec_cli.lm.door import Row

        num_fed = self._num_fed
        for row in rows:
            if row.cache_salt is not None and row.handle not in num_fed:
                num_fed[row.handle] = self.lm.adopt(row.handle, row.context, row.cache_salt)
        able = [row for row in rows if row.most_depth(self.lm.max_context) > 0]
        while long := [row for row in able if len(row.context) - num_fed.get(row.handle, 0) > _CHUNK]:
            for row in long:
                num_fed[row.handle] = num_fed.get(row.handle, 0) + _CHUNK
            self.lm.score([Row(row.handle, row.context[: num_fed[row.handle]], num_logits=0) for row in long])
        for row in able:
            num_fed[row.handle] = len(row.context)

    def _continue_plain(self, rows: Sequence[DraftRow]) -> dict[int, Guesses]:
        """Guesses of plain rows by their places, those of each shape from one call of the LM, where it has such a call.

        A row without a first token is left out: `_grow` raises its error.
        """
        from specdec_cli.lm.door import DraftForm, Row

        guesses: dict[int, Guesses] = {}
        takes_noise = self.lm.recording != "none"
        plain = {
            place: row for place, row in enumerate(rows) if row.is_plain or (takes_noise and row.is_plain_but_noise)
        }
        for tree, depths in by_shape(plain, self.lm.max_context):
            its = [rows[place] for place in depths]
            if takes_noise:
                draws = draws_of(its, [*depths.values()], self.lm.device, self._num_tokens)
            else:
                draws = [row.draw(depth) for row, depth in zip(its, depths.values(), strict=True)]
            lm_rows = [
                Row(row.handle, row.context, depth, draw=draw)
                for row, depth, draw in zip(its, depths.values(), draws, strict=True)
            ]
            continuations = self.lm.guess(lm_rows, self._num_tokens, DraftForm(tree, self._mask))
            if continuations is None:
                continue
            if continuations.unread is not None:
                self._unread.append(continuations.unread)
            self.on_device = continuations.on_device
            found = zip(depths, Guesses.plain(its, continuations, tree), strict=True)
            guesses |= {place: guess for place, guess in found if guess.drafted}
        return guesses

    def release(self, handle: int) -> None:
        """Forget a sequence, and have the draft model forget it."""
        self._num_fed.pop(handle, None)
        if self._loaded is not None:
            self._loaded.release(handle)
