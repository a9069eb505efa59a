"""A draft model with another tokenizer than the target's ("universal assisted", Timor et al. 2025, arXiv 2502.05202).

By text ("SLEM"), the draft continues the context's text in its own tokens, and what it says is encoded with the
target's tokenizer: its likeliest continuation, guessed without chance. By intersection ("TLI"), it is sampled as the
target will be, over the tokens that both have. Either way the target verifies its own tokens, so the output is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import ceil
from typing import TYPE_CHECKING

from specdec_cli.drafted import Drafted
from specdec_cli.drafters.contract import DraftRow, Guesses, Resources, WithoutFeatures
from specdec_cli.drafters.language_model import LMDrafter
from specdec_cli.errors import UsageError
from specdec_cli.lm.cache.cache_plan import SPARE_TOKENS

if TYPE_CHECKING:
    from specdec_cli.drafters.translated_lm import TranslatedLM
    from specdec_cli.lm.door import LM
    from specdec_cli.text.shared_vocabulary import SharedVocabulary
    from specdec_cli.text.tokenizer import Tokenizer
    from specdec_cli.text.translation import Translation

AUTO, TEXT, INTERSECTION = "auto", "text", "intersection"
_MOST_DRAFTED = 8  # of the draft's tokens for one of the target's
_RATIO_WEIGHT = 16  # tokens of context that the sample text's ratio counts as


class _OverVocabulary(LMDrafter):
    """Guesses with a language model that is loaded already, in its vocabulary or in the target's."""

    def load_lm(self, resources: Resources) -> LM:
        """The model that it is given."""
        return resources.load_lm(self._name)


@dataclass
class Drafter(WithoutFeatures):
    """Guesses with a language model whose tokenizer differs from the target's.

    Args:
        model: hub id, folder or built-in name of the draft.
        match: by `text`, by `intersection`, or `auto`: by intersection above temperature 0 and for trees, else by text.
    """

    model: str
    match: str = AUTO

    def __post_init__(self) -> None:
        """Refuse an empty name and an unknown way to match."""
        if self.match not in (AUTO, TEXT, INTERSECTION):
            raise UsageError(f"`match` of `universal` must be {AUTO}, {TEXT} or {INTERSECTION}, not `{self.match}`")
        self._by_text = _OverVocabulary(self.model)
        self._by_intersection = _OverVocabulary(self.model)
        self._translated: TranslatedLM | None = None
        self._num_tokens = 0
        self._ways: set[str] = set()
        self._num_held: dict[int, int] = {}

    @property
    def lm(self) -> TranslatedLM:
        """The loaded draft model, as a model over the target's vocabulary."""
        assert self._translated is not None, "a drafter is loaded before it drafts"
        return self._translated

    @property
    def shared_vocabulary(self) -> SharedVocabulary:
        """The tokens that target and draft have in common."""
        return self.lm.translator.shared

    @property
    def max_context(self) -> int | None:
        """Longest context that the draft model reads, about, in the target's tokens."""
        return self.lm.max_context

    @property
    def builds_trees(self) -> bool:
        """Whether it may guess by intersection, and the draft model scores trees."""
        return INTERSECTION in self._ways and self.lm.scores_trees

    @property
    def draws(self) -> bool:
        """Whether it may guess by intersection."""
        return INTERSECTION in self._ways

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Of the draft model and its KV cache."""
        return self.lm.num_parameters, self.lm.num_bytes

    def way(self, temperature: float, is_tree: bool = False) -> str:
        """By `text` or by `intersection`, for a request."""
        if len(self._ways) == 1:
            return next(iter(self._ways))
        return INTERSECTION if temperature > 0 or is_tree else TEXT

    def forced_lm(self, temperature: float) -> LM | None:
        """The translated draft model where guesses are drawn from its distribution; None where they are text."""
        return self.lm if self.way(temperature) == INTERSECTION else None

    def load(self, resources: Resources) -> None:
        """Load the draft model and its tokenizer.

        Raises:
            UsageError: a model without a tokenizer, or too few tokens in common.
        """
        from specdec_cli.drafters.translated_lm import CacheOfOtherTokens, TranslatedLM
        from specdec_cli.text.shared_vocabulary import shared_vocabulary
        from specdec_cli.text.translation import Translator

        target, draft = _tokenizers(resources, self.model)
        own = resources.load_lm(self.model)
        num_draft = min(draft.num_tokens, own.vocab_size)
        shared = shared_vocabulary(target, draft, resources.num_tokens, num_draft)
        self._ways = ways_of(self.model, self.match, shared)
        self._num_tokens = resources.num_tokens
        translated = self._translated = TranslatedLM(own, Translator(target, draft, shared), resources.num_tokens)
        resources.plan_cache(CacheOfOtherTokens(own, shared.draft_tokens_per_token))
        self._by_text.load(replace(resources, load_lm=lambda _: own, num_tokens=num_draft))
        self._by_intersection.load(replace(resources, load_lm=lambda _: translated))

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """Up to k tokens per row, each by its request's way.

        Raises:
            RunError: as a draft model does.
        """
        guesses = [Guesses() for _ in rows]
        ways = [self.way(row.params.temperature, row.tree is not None) for row in rows]
        has_room = self._have_room(rows)
        asked: dict[str, Callable[[Sequence[DraftRow]], list[Guesses]]] = {
            TEXT: self._propose_by_text,
            INTERSECTION: self._by_intersection.propose,
        }
        for way, propose in asked.items():
            places = [i for i, its in enumerate(ways) if its == way and has_room[i]]
            for place, guess in zip(places, _placed(propose, rows, places), strict=True):
                guesses[place] = guess
        return guesses

    def release(self, handle: int) -> None:
        """Forget a sequence, and have the draft model forget it."""
        self._num_held.pop(handle, None)
        if self._translated is not None:
            self._by_text.release(handle)
            self._by_intersection.release(handle)

    def _have_room(self, rows: Sequence[DraftRow]) -> list[bool]:
        """Whether the draft model can read each row's context, and its cache has room for it and a guess."""
        size, free = self.lm.block_size, self.lm.num_free_blocks
        has_room = []
        for row in rows:
            num = len(self.lm.translation(row.handle, row.context).translated)
            most = num + max(self._num_drafted(row, num), row.most_nodes) + SPARE_TOKENS
            blocks = -(-most // size) - -(-self._num_held.get(row.handle, 0) // size)
            has_room.append(0 < num <= self.lm.own.max_context and blocks <= free)
            if has_room[-1]:
                free, self._num_held[row.handle] = free - max(blocks, 0), num
        return has_room

    def _num_drafted(self, row: DraftRow, num: int) -> int:
        """How many of the draft's tokens say about as much as k of the target's, after `num` for the context."""
        weight = _RATIO_WEIGHT
        ratio = (num + weight * self.shared_vocabulary.draft_tokens_per_token) / (len(row.context) + weight)
        return ceil(row.k * min(ratio, _MOST_DRAFTED))

    def _propose_by_text(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """The draft's likeliest continuation of each text, in the target's tokens."""
        translations = [self.lm.translation(row.handle, row.context) for row in rows]
        own = [self._in_draft_tokens(row, its) for row, its in zip(rows, translations, strict=True)]
        guesses = self._by_text.propose(own)
        return [
            self._in_target_tokens(row, its, guess.read())
            for row, its, guess in zip(rows, translations, guesses, strict=True)
        ]

    def _in_draft_tokens(self, row: DraftRow, translation: Translation) -> DraftRow:
        from specdec_cli.sampling.params import SamplingParams

        context = translation.translated
        return DraftRow(
            handle=row.handle,
            context=context,
            num_prompt_tokens=len(context),
            k=self._num_drafted(row, len(context)),
            params=SamplingParams(),
            stop_ids=frozenset(),
            needs_q=False,
            shares_noise=False,
            p_min=row.p_min,
            cache_salt=row.cache_salt,
        )

    def _in_target_tokens(self, row: DraftRow, translation: Translation, guess: Guesses) -> Guesses:
        tokens = self.lm.translator.guessed(translation, guess.drafted.tokens)[: row.k]
        return Guesses(Drafted.chain(takewhile(lambda token: token < self._num_tokens, tokens)))


def ways_of(name: str, match: str, shared: SharedVocabulary) -> set[str]:
    """The ways in which a draft guesses: not by intersection where that holds next to no tokens.

    Raises:
        UsageError: it was asked to guess by intersection.
    """
    from specdec_cli.text.shared_vocabulary import LEAST_SHARE

    if match != AUTO and (match == TEXT or shared.share_of_text >= LEAST_SHARE):
        return {match}
    if match == INTERSECTION:
        message = f"the draft `{name}` has too few tokens in common with the target: {shared}"
        raise UsageError(message, "draft by text: `match: text`")
    return {TEXT, INTERSECTION} if shared.share_of_text >= LEAST_SHARE else {TEXT}


def _tokenizers(resources: Resources, name: str) -> tuple[Tokenizer, Tokenizer]:
    """The target's and the draft's.

    Raises:
        UsageError: one of them has none.
    """
    if resources.tokenizer is None or resources.load_tokenizer is None:
        raise UsageError("the drafting method `universal` needs the target's tokenizer", "give the engine one")
    draft = resources.load_tokenizer(name)
    for role, tokenizer in (("target", resources.tokenizer), (f"draft `{name}`", draft)):
        if tokenizer.is_stand_in:
            message = f"the drafting method `universal` compares texts, and the {role} has no tokenizer"
            raise UsageError(message, "name the model alone, without `universal`")
    return resources.tokenizer, draft


def _placed(
    propose: Callable[[Sequence[DraftRow]], list[Guesses]], rows: Sequence[DraftRow], places: Sequence[int]
) -> list[Guesses]:
    """Guesses for some rows; an error names its row's place among all of them.

    Raises:
        LogitsError: one row's own.
    """
    from specdec_cli.sampling.chain import LogitsError

    try:
        return propose([rows[place] for place in places]) if places else []
    except LogitsError as error:
        raise LogitsError(error.message, places[error.row], error.hint) from error
