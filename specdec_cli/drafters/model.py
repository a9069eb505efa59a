"""A draft model: any smaller causal LM, sampled as the target will be (Leviathan et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdec_cli.drafted import NOTHING, Drafted
from specdec_cli.drafters.contract import DraftRow, Guesses, Resources
from specdec_cli.errors import RunError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.lm.cache.unread import Unread
    from specdec_cli.lm.door import LM, Draw
    from specdec_cli.sampling.chain import Distribution

_CHUNK = 512  # tokens of an unseen context per forward, so that a long prompt's activations stay small


@dataclass
class Drafter:
    """Guesses with a smaller language model: in one call where it has one for that, else round by round over all rows.

    Args:
        model: hub id, folder or built-in name of the draft.
    """

    model: str

    def __post_init__(self) -> None:
        """Refuse an empty name."""
        if not self.model.strip():
            raise UsageError("`model` of the draft is empty", "name a hub id, a folder or a built-in")
        self._loaded: LM | None = None
        self._num_tokens = 0
        self._num_fed: dict[int, int] = {}
        self._unread: Unread | None = None

    @property
    def lm(self) -> LM:
        """The loaded draft model."""
        assert self._loaded is not None, "a drafter is loaded before it drafts"
        return self._loaded

    @property
    def max_context(self) -> int | None:
        """Longest context that the draft model reads."""
        return self.lm.max_context

    def load(self, resources: Resources) -> None:
        """Load the draft model.

        Raises:
            UsageError: it scores fewer tokens than the target's tokenizer has.
        """
        self._loaded = resources.load_lm(self.model)
        self._num_tokens = resources.num_tokens
        if self.lm.vocab_size < self._num_tokens:
            message = f"the draft `{self.model}` scores {self.lm.vocab_size} tokens, the target has {self._num_tokens}"
            raise UsageError(message, "choose a draft with the target's tokenizer")

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """Up to k tokens per row. Of rows that are not guessed in one call, round j scores one position each.

        Raises:
            RunError: what it guessed before, unread, was no token.
        """
        self._check_last_guess()
        for row in rows:
            if row.cache_salt is not None and row.handle not in self._num_fed:
                self._num_fed[row.handle] = self.lm.adopt(row.handle, row.context, row.cache_salt)
        drafts = [_Draft(row, place) for place, row in enumerate(rows)]
        drafting = [draft for draft in drafts if draft.wants_more(self.lm.max_context)]
        self._feed_long_contexts(drafting)
        self._guess([draft for draft in drafting if draft.is_plain])
        offset = 0
        while active := [draft for draft in drafts if draft.wants_more(self.lm.max_context)]:
            q = self._score(active)
            if q is None:
                continue
            _stop_unsure(active, q)
            self._sample(active, q, offset)
            offset += 1
        return [draft.guesses() for draft in drafts]

    def release(self, handle: int) -> None:
        """Forget a sequence, and have the draft model forget it."""
        self._num_fed.pop(handle, None)
        if self._loaded is not None:
            self._loaded.release(handle)

    def _check_last_guess(self) -> None:
        """A guess that was not read when it was made is known by now."""
        unread, self._unread = self._unread, None
        if unread is not None and unread.is_read and not unread.is_whole:
            raise RunError(
                f"the draft `{self.model}` gave no finite number as its largest logit",
                "try --draft-dtype float32, or another checkpoint if it is float32 already",
            )

    def _feed_long_contexts(self, drafts: Sequence[_Draft]) -> None:
        """Fill the cache chunk by chunk until at most one chunk of each context is unseen."""
        from specdec_cli.lm.door import Row

        fed = self._num_fed
        while long := [d.row for d in drafts if len(d.row.context) - fed.get(d.row.handle, 0) > _CHUNK]:
            for row in long:
                fed[row.handle] = fed.get(row.handle, 0) + _CHUNK
            self.lm.score([Row(row.handle, row.context[: fed[row.handle]], num_logits=0) for row in long])
        for draft in drafts:
            fed[draft.row.handle] = len(draft.row.context)

    def _guess(self, drafts: Sequence[_Draft]) -> None:
        """Guess for plain rows in one call, where the LM has one for it."""
        from specdec_cli.lm.door import Row

        most = self.lm.max_context
        rows = [Row(d.row.handle, d.row.context, d.most_tokens(most), draw=d.draw(most)) for d in drafts]
        found = self.lm.guess(rows, self._num_tokens) if rows else None
        if found is not None:
            self._unread = found.unread
            for i, (draft, tokens) in enumerate(zip(drafts, found.tokens, strict=True)):
                draft.tokens, draft.unread = tokens, found.unread
                if draft.needs_q:
                    draft.q.append(found.q[i])

    def _score(self, drafts: Sequence[_Draft]) -> Distribution | None:
        """The draft's distribution q after each row's context and its tokens drafted so far.

        None where one of them has none: that row ends with what it has, whatever that is, as it decides nothing.

        Raises:
            LogitsError: a row has none at its first token.
        """
        from specdec_cli.lm.door import Row
        from specdec_cli.sampling.chain import ChainRow, LogitsError, distribution

        contexts = [draft.row.context + draft.tokens for draft in drafts]
        logits = self.lm.score([Row(d.row.handle, c, num_logits=1) for d, c in zip(drafts, contexts, strict=True)])
        chain = [
            ChainRow(d.row.params, c, d.row.num_prompt_tokens, NOTHING, d.row.stop_ids)
            for d, c in zip(drafts, contexts, strict=True)
        ]
        try:
            return distribution(logits, chain, self._num_tokens)
        except LogitsError as error:
            if drafts[error.row].tokens:
                drafts[error.row].is_done = True
                return None
            message = f"the draft `{self.model}`: {error.message}"
            raise LogitsError(message, drafts[error.row].place, error.hint) from error

    def _sample(self, drafts: Sequence[_Draft], q: Distribution, offset: int) -> None:
        """Draw every row's next token and keep it, with its q, where the row still drafts.

        Noise is keyed and has no state: a draw that is not kept changes no other.
        """
        from specdec_cli.sampling.draft import draft_tokens

        if all(draft.is_done for draft in drafts):
            return
        rows = [draft.row for draft in drafts]
        params, shares_noise = [row.params for row in rows], [row.shares_noise for row in rows]
        tokens = draft_tokens(q, params, shares_noise, [len(row.context) for row in rows], offset)
        for i, (draft, token) in enumerate(zip(drafts, tokens, strict=True)):
            if not draft.is_done:
                draft.tokens.append(token)
                if draft.needs_q:
                    draft.q.append(q.dense()[i : i + 1])


def _stop_unsure(drafts: Sequence[_Draft], q: Distribution) -> None:
    """End rows whose largest q is below their p_min; before the draw, as deciding on a drawn token's q is biased."""
    if any(draft.row.p_min > 0 for draft in drafts):
        for draft, confidence in zip(drafts, q.confidence().tolist(), strict=True):
            draft.is_done = confidence < draft.row.p_min


@dataclass(slots=True)
class _Draft:
    """One row's guess as it grows; `q` holds [tokens, V] float32 in parts where verification looks at it."""

    row: DraftRow
    place: int
    tokens: list[int] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    unread: Unread | None = None
    is_done: bool = False

    @property
    def needs_q(self) -> bool:
        return self.row.needs_q and self.row.params.temperature > 0

    @property
    def is_plain(self) -> bool:
        """Whether the draft's own scores alone say how the row goes on: with what is likeliest, or by a draw."""
        from specdec_cli.sampling.chain import ChainRow, is_edited

        row = self.row
        needs_wide_noise = row.params.temperature > 0 and row.shares_noise
        if row.p_min > 0 or needs_wide_noise:
            return False
        return not is_edited(ChainRow(row.params, row.context, row.num_prompt_tokens, NOTHING, row.stop_ids))

    def draw(self, max_context: int) -> Draw | None:
        """How a plain row's tokens are drawn; None where the likeliest are taken."""
        from specdec_cli.lm.door import Draw
        from specdec_cli.sampling import noise

        params, num = self.row.params, self.most_tokens(max_context)
        if params.temperature == 0:
            return None
        uniforms = noise.uniforms(params.seed, params.index, len(self.row.context), noise.Purpose.DRAFT, num)
        return Draw(params.temperature, params.top_k, params.top_p, params.min_p, uniforms.tolist())

    def most_tokens(self, max_context: int) -> int:
        """How many tokens are wanted in all, each of which the draft model can read all before."""
        return min(self.row.k, max_context + 1 - len(self.row.context))

    def wants_more(self, max_context: int) -> bool:
        """Whether another token is wanted and the draft model can read all that stands before it."""
        return not self.is_done and len(self.tokens) < self.most_tokens(max_context)

    def guesses(self) -> Guesses:
        """The guess, its q stacked to [len(tokens), V]."""
        import torch

        return Guesses(Drafted.chain(self.tokens), torch.cat(self.q) if self.q else None, self.unread)
