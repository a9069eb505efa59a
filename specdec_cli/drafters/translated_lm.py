"""A draft model with another tokenizer behind the LM's door of the target's vocabulary: token-level intersection.

Its logits are those of the draft for the tokens that both tokenizers have, and none for all others, so that the chain
from logits to q normalizes over the intersection (Timor et al. 2025, arXiv 2502.05202, "TLI"). Every context is read in
the draft's own tokens, so q is a function of the context, the same in drafting as in a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, cast

from specdec_cli.lm.door import CHAIN, DraftForm, Row

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specdec_cli.lm.cache.cache_plan import CacheNeed
    from specdec_cli.lm.door import LM, Tap
    from specdec_cli.lm.files.origin import Origin
    from specdec_cli.lm.traffic import Traffic
    from specdec_cli.lm.transformers_lm import TransformersLM
    from specdec_cli.text.translation import Translation, Translator


@dataclass(slots=True)
class _DraftText:
    """Positions of a row that the draft reads as one text.

    Args:
        row: in the draft's tokens.
        wanted: which of its logits are those of the positions, one after another.
    """

    row: Row
    wanted: list[int]


class CacheOfOtherTokens:
    """A draft model's cache, which is planned for its own tokens; what is not described here is the model's own.

    Args:
        own: the draft model.
        tokens_per_token: its tokens for one of the target's.
    """

    device: torch.device
    block_size: int
    num_blocks: int
    vocab_size: int
    weight_bytes: int
    promised_bytes: int
    hold: Callable[..., None]

    def __init__(self, own: LM, tokens_per_token: float) -> None:
        self.own, self._ratio = cast("TransformersLM", own), tokens_per_token

    def __getattr__(self, name: str) -> Any:
        """Anything else of the draft model."""
        if name == "own":
            raise AttributeError(name)
        return getattr(self.own, name)

    def draft_cache_need(self, num_seqs: int, num_drafted: int, target_context: int) -> CacheNeed:
        """With room for the target's texts, which are more or fewer tokens here."""
        return self.own.draft_cache_need(num_seqs, num_drafted, target_context, self._ratio)


class TranslatedLM:
    """A draft model as an LM over the target's vocabulary; what is not described here is the draft model's own.

    Args:
        own: the draft model.
        translator: from the target's tokens to the draft's.
        num_tokens: V, the target's real vocabulary.

    Attributes:
        vocab_size: V.
        max_context: most tokens of context in the target's tokens, by the ratio of a sample text. A context that takes
            more of the draft's tokens than the draft reads gets equal logits.
    """

    name: str
    num_blocks: int
    block_size: int
    device: torch.device
    dtype: torch.dtype
    decoder: str
    decoder_obstacle: str | None
    graphs_obstacle: str | None
    state_bytes: int
    taps: tuple[Tap, ...]
    origin: Origin
    num_parameters: int | None
    num_bytes: int | None
    traffic: Traffic | None
    scores_trees: bool
    num_free_blocks: int

    def __init__(self, own: LM, translator: Translator, num_tokens: int) -> None:
        import torch

        self.own, self.translator = own, translator
        shared = translator.shared
        self.vocab_size = num_tokens
        self.max_context = int(own.max_context / max(1.0, shared.draft_tokens_per_token))
        self._of_draft = dict(zip(shared.of_target, shared.of_draft, strict=True))
        places = torch.tensor([self._of_draft.get(token, -1) for token in range(num_tokens)], dtype=torch.int64)
        self._is_lacking = (places < 0).to(own.device)
        self._places = places.clamp(min=0).to(own.device)
        self._translations: dict[int, Translation] = {}

    def __getattr__(self, name: str) -> Any:
        """Anything else of the draft model, as it is now: its cache is planned after it was loaded."""
        if name == "own":
            raise AttributeError(name)
        return getattr(self.own, name)

    def translation(self, handle: int, context: Sequence[int]) -> Translation:
        """The translation of a sequence's context."""
        translation = self._translations.get(handle)
        if translation is None:
            translation = self._translations[handle] = self.translator.start()
        translation.follow(context)
        return translation

    def score(self, rows: Sequence[Row]) -> Tensor:
        """Logits [sum of num_logits, V] float32 as `LM.score` gives them; minus infinity where a token is not shared.

        Where the draft cuts a row's text into other tokens as it grows, the row has several parts, which are scored in
        turn, those of all rows together.
        """
        import torch

        parts = [self._parts(row) for row in rows]
        row_logits: list[list[Tensor]] = [[] for _ in rows]
        for turn in range(max(map(len, parts), default=0)):
            places = [place for place, its in enumerate(parts) if turn < len(its)]
            for place, logits in zip(places, self._score([parts[place][turn] for place in places]), strict=True):
                row_logits[place].append(logits)
        wanted = [piece for its in row_logits for piece in its if len(piece)]
        if not wanted:
            return torch.empty(0, self.vocab_size, device=self.device)
        return self._over_target(wanted[0] if len(wanted) == 1 else torch.cat(wanted))

    def guess(self, rows: Sequence[Row], num_tokens: int, form: DraftForm = CHAIN) -> None:
        """None: every token is chosen in the target's vocabulary."""

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Begin a sequence with the longest prefix that the draft model has cached; how many whole tokens that is."""
        translation = self.translation(handle, context)
        return translation.num_before(self.own.adopt(handle, translation.translated, salt))

    def release(self, handle: int) -> None:
        """Forget a sequence."""
        self._translations.pop(handle, None)
        self.own.release(handle)

    def tap(self, taps: Sequence[Tap]) -> None:
        """Add hidden states, at the positions of the draft's tokens.

        Raises:
            UsageError: as the draft model does.
        """
        self.own.tap(taps)

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Input embeddings [n, hidden] of shared tokens."""
        import torch

        return self.own.embed([self._of_draft[token] for token in torch.as_tensor(tokens).tolist()])

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of hidden states behind the final norm [n, hidden]."""
        return self._over_target(self.own.head(hidden))

    def _over_target(self, logits: Tensor) -> Tensor:
        """Logits [n, V] of the target's tokens, from those of the draft's."""
        return logits.index_select(1, self._places).masked_fill_(self._is_lacking, -inf)

    def _score(self, parts: Sequence[_DraftText]) -> list[Tensor]:
        """The draft's logits at each part's positions, in the draft's vocabulary."""
        import torch

        is_read = [0 < part.row.longest <= self.own.max_context for part in parts]
        rows = [part.row for part, is_one in zip(parts, is_read, strict=True) if is_one]
        sizes = [row.num_logits for row in rows]
        logits = iter(torch.split(self.own.score(rows), sizes) if rows else ())
        part_logits = []
        for part, is_one in zip(parts, is_read, strict=True):
            its = next(logits) if is_one else torch.zeros(part.row.num_logits, self.own.vocab_size, device=self.device)
            whole = part.wanted == list(range(part.row.num_logits))
            part_logits.append(its if whole else its[part.wanted])
        return part_logits

    def _parts(self, row: Row) -> list[_DraftText]:
        """A row in the draft's tokens."""
        if row.num_logits <= 1 or row.drafted:
            tokens = self.translation(row.handle, row.context).translated
            drafted = row.drafted.with_tokens(self._of_draft[token] for token in row.drafted.tokens)
            return [_DraftText(Row(row.handle, tokens, row.num_logits, drafted), list(range(row.num_logits)))]
        parts: list[_DraftText] = []
        first = 0
        for end in range(len(row.context) - row.num_logits + 1, len(row.context) + 1):
            tokens = list(self.translation(row.handle, row.context[:end]).translated)
            if parts and tokens[: len(parts[-1].row.context)] == parts[-1].row.context and first:
                wanted = [*parts[-1].wanted, len(tokens) - first]
                parts[-1] = _DraftText(Row(row.handle, tokens, len(tokens) - first + 1), wanted)
            else:
                first = len(tokens)
                parts.append(_DraftText(Row(row.handle, tokens, 1), [0]))
        return parts
