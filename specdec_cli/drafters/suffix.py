"""Suffix decoding: how the newest tokens went on before, here and in earlier outputs (Oliaro et al. 2024).

Every earlier occurrence of the context's end votes for its continuation, and the longer the text before it agrees the
more its vote counts. A request's own text is looked at always; outputs of requests that ended are where prompts share
cached tokens too (prefix caching), among requests of one salt alone.

An output that was sampled with a request's own seed and index is kept from it: the noise that chose that output is the
one that judges this request's guesses, and to know what it chose would bias them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec_cli.drafted import NOTHING, Drafted
from specdec_cli.drafters.contract import DraftRow, Guesses, Resources, WithoutFeatures
from specdec_cli.drafters.suffix_index import GuessLimits, SuffixIndex
from specdec_cli.errors import UsageError

_END = -1  # parts two outputs

NoiseKey = tuple[int, int]
"""Seed and index of a request that samples."""


@dataclass
class Drafter(WithoutFeatures):
    """Guesses by looking back in prompt, output and outputs of other requests.

    Args:
        min_prob: a continuation ends before its probability falls below this.
        min_expected: nothing is guessed where fewer of the next 8 tokens than this are expected to be right.
        cache: tokens of ended requests' outputs that are kept, the oldest outputs forgotten first; 0 keeps none.
    """

    lm = None
    max_context = None
    builds_trees = True
    draws = False

    min_prob: float = 0.1
    min_expected: float = 1.0
    cache: int = 1_000_000

    def __post_init__(self) -> None:
        """Refuse options out of range."""
        if not 0 < self.min_prob <= 1:
            raise UsageError(f"`min_prob` of `suffix` must be above 0 and at most 1, not `{self.min_prob}`")
        if not 0 <= self.min_expected <= 64:
            raise UsageError(f"`min_expected` of `suffix` must be from 0 to 64, not `{self.min_expected}`")
        if not 0 <= self.cache <= 1 << 30:
            raise UsageError(f"`cache` of `suffix` must be from 0 to {1 << 30} tokens, not `{self.cache}`")
        self._num_tokens = 0
        self._texts: dict[int, _OwnText] = {}
        self._outputs = _Outputs(self.cache)

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """No parameters; the memory of all indexes."""
        return 0, self._outputs.num_bytes + sum(text.index.num_bytes for text in self._texts.values())

    def load(self, resources: Resources) -> None:
        """Learn the vocabulary's size, and build the index's library.

        Raises:
            RunError: there is no C++ compiler.
        """
        self._num_tokens = resources.num_tokens
        SuffixIndex()

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """The likeliest continuations of each row's context: a chain, or the nodes of a tree with the most votes."""
        return [Guesses(self._guess(row)) for row in rows]

    def _guess(self, row: DraftRow) -> Drafted:
        text = self._texts.get(row.handle)
        if text is None or not text.continues(row.context):
            text = self._texts[row.handle] = _OwnText(row)
        text.follow(row.context)
        limits = GuessLimits(row.k, row.most_nodes, row.tree, self._num_tokens, self.min_prob, self.min_expected)
        if not limits.most_nodes:
            return NOTHING
        noise = None if row.shares_noise else text.noise
        return text.index.propose(limits, self._outputs.of(row.cache_salt, noise))

    def release(self, handle: int) -> None:
        """Forget a sequence, and keep its output for those that may share it."""
        text = self._texts.pop(handle, None)
        if text is not None and text.salt is not None:
            self._outputs.add(text.salt, text.context[text.num_prompt_tokens :], text.noise)

    def clear(self) -> None:
        """Forget all outputs of sequences that ended."""
        self._outputs = _Outputs(self.cache)


class _OwnText:
    """A sequence's own text; the index holds the tokens that its last row had."""

    def __init__(self, row: DraftRow) -> None:
        self.context = row.context
        self.num_prompt_tokens = row.num_prompt_tokens
        self.salt = row.cache_salt
        self.noise = (row.params.seed, row.params.index) if row.params.temperature > 0 else None
        self.index = SuffixIndex()
        self._num = 0

    def continues(self, context: list[int]) -> bool:
        """Whether a context begins with what is indexed: the same list only grows, another one is compared."""
        if len(context) < self._num:
            return False
        return context is self.context or context[: self._num] == self.context[: self._num]

    def follow(self, context: list[int]) -> None:
        """Take in what is new."""
        self.index.extend(context[self._num :])
        self.context, self._num = context, len(context)


@dataclass(slots=True)
class _Shared:
    """Outputs of one salt, and how many were sampled with each noise."""

    index: SuffixIndex = field(default_factory=SuffixIndex)
    noises: Counter[NoiseKey] = field(default_factory=Counter)
    num_outputs: int = 0


class _Outputs:
    """Outputs of ended sequences by salt, within a number of tokens over all."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num = 0
        self._by_salt: dict[str, _Shared] = {}
        self._oldest: deque[tuple[str, int, NoiseKey | None]] = deque()  # salt, tokens, noise

    @property
    def num_bytes(self) -> int:
        """Memory of the indexes."""
        return sum(shared.index.num_bytes for shared in self._by_salt.values())

    def of(self, salt: str | None, noise: NoiseKey | None) -> SuffixIndex | None:
        """The outputs of a salt for a request that samples with a noise; None where it must not see them."""
        shared = None if salt is None else self._by_salt.get(salt)
        return None if shared is None or (noise is not None and noise in shared.noises) else shared.index

    def add(self, salt: str, output: list[int], noise: NoiseKey | None) -> None:
        """Keep an output, and forget the oldest ones where there is no room."""
        tokens = [*output, _END]
        if not output or len(tokens) > self._most:
            return
        while self._num + len(tokens) > self._most:
            self._forget_oldest()
        shared = self._by_salt.setdefault(salt, _Shared())
        shared.index.extend(tokens)
        shared.num_outputs += 1
        if noise is not None:
            shared.noises[noise] += 1
        self._oldest.append((salt, len(tokens), noise))
        self._num += len(tokens)

    def _forget_oldest(self) -> None:
        salt, num, noise = self._oldest.popleft()
        self._num -= num
        shared = self._by_salt[salt]
        shared.num_outputs -= 1
        if not shared.num_outputs:
            del self._by_salt[salt]
            return
        shared.index.drop(num)
        if noise is not None:
            shared.noises[noise] -= 1
            if not shared.noises[noise]:
                del shared.noises[noise]
