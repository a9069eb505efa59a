"""Prompt lookup: what followed the last time the newest tokens were seen (Saxena 2023).

The longest n-gram that occurred before wins, of its occurrences the latest. Each sequence has an index from n-gram to
place that grows with the sequence: a step looks only at its new tokens. (Beside that, one comparison of integer lists
makes sure that the context still begins with what was indexed.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.drafters.contract import DraftRow, Guesses, Resources, WithoutModel
from specdec_cli.errors import UsageError
from specdec_cli.tree_shape import TreeShape

_MOST_OCCURRENCES = 256  # looked at for a tree that they do not fill


@dataclass
class Drafter(WithoutModel):
    """Guesses by looking back in prompt and output.

    Args:
        max: longest n-gram to look for, tried first.
        min: shortest n-gram to look for.
    """

    builds_trees = True
    max: int = 4
    min: int = 2

    def __post_init__(self) -> None:
        """Refuse n-gram lengths out of range."""
        if not 1 <= self.min <= 64:
            raise UsageError(f"`min` of `ngram` must be from 1 to 64, not `{self.min}`")
        if not self.min <= self.max <= 64:
            raise UsageError(f"`max` of `ngram` must be from min (`{self.min}`) to 64, not `{self.max}`")
        self._num_tokens = 0
        self._indexes: dict[int, Index] = {}

    def load(self, resources: Resources) -> None:
        """Learn the vocabulary's size."""
        self._num_tokens = resources.num_tokens

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """Tokens after the last occurrence of the longest n-gram; past the end of the text, its own guess continues.

        A tree holds the continuations of further occurrences as well, as far as its shape has room: those of the
        longest n-gram first, the latest before earlier ones, then those of shorter n-grams.
        """
        return [Guesses(self._guess(row)) for row in rows]

    def _guess(self, row: DraftRow) -> Drafted:
        index = self._indexes.setdefault(row.handle, Index(self.min, self.max))
        index.follow(row.context)
        continuations = (self._continue(row, place) for place in index.find_all())
        if row.tree is None:
            return Drafted.chain(next(continuations, []))
        return _merge(islice(continuations, _MOST_OCCURRENCES), row.tree, row.most_nodes)

    def _continue(self, row: DraftRow, place: int) -> list[int]:
        known = len(row.context)
        tokens: list[int] = []
        for i in range(place, place + row.k):
            token = row.context[i] if i < known else tokens[i - known]
            if token >= self._num_tokens:  # a prompt given as ids may hold ids of the padded vocabulary
                break
            tokens.append(token)
        return tokens

    def release(self, handle: int) -> None:
        """Forget a sequence."""
        self._indexes.pop(handle, None)


class Index:
    """From n-gram to where its latest occurrence ends, over all but the last token of a sequence.

    The last token's n-grams stay out: they are what is looked for, and nothing follows them.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.tokens: list[int] = []
        self.num_insertions = 0
        self._lengths = range(shortest, longest + 1)
        self._num_indexed = 0
        self._places: dict[tuple[int, ...], int] = {}
        # For a cut back: which place each insertion displaced, in order (None: the n-gram was new).
        self._displaced: list[int | None] = []

    def follow(self, context: Sequence[int]) -> None:
        """Make the index that of this context: cut back to the common prefix, then take the new tokens in."""
        num_common = _common_prefix(self.tokens, context)
        if num_common < len(self.tokens):
            self._cut_back(num_common)
        self.tokens.extend(context[num_common:])
        for end in range(self._num_indexed + 1, len(self.tokens)):
            for length in self._lengths:
                if length <= end:
                    gram = tuple(self.tokens[end - length : end])
                    self._displaced.append(self._places.get(gram))
                    self._places[gram] = end
                    self.num_insertions += 1
            self._num_indexed = end

    def find_all(self) -> Iterator[int]:
        """The places after earlier occurrences of the n-grams at the end: longest first, of each the latest first."""
        seen = set()
        for length in reversed(self._lengths):
            if length <= len(self.tokens):
                place = self._places.get(tuple(self.tokens[-length:]))
                while place is not None:
                    if place not in seen:
                        seen.add(place)
                        yield place
                    place = self._displaced[self._insertion(place, length)]

    def _insertion(self, end: int, length: int) -> int:
        """The number of the insertion of the n-gram of a length that ends before `end`."""
        return sum(max(0, end - each_length) for each_length in self._lengths) + length - self._lengths[0]

    def _cut_back(self, num_kept: int) -> None:
        for end in range(self._num_indexed, max(0, num_kept - 1), -1):
            for length in reversed(self._lengths):
                if length <= end:
                    gram = tuple(self.tokens[end - length : end])
                    before = self._displaced.pop()
                    if before is None:
                        del self._places[gram]
                    else:
                        self._places[gram] = before
        self._num_indexed = min(self._num_indexed, max(0, num_kept - 1))
        del self.tokens[num_kept:]


def _merge(continuations: Iterable[Sequence[int]], shape: TreeShape, most_nodes: int) -> Drafted:
    """A tree of texts that follow the context, each added as far as the shape has room for it."""
    nodes: dict[tuple[int, int], int] = {}
    num_children: Counter[int] = Counter()
    places = {CONTEXT_END: CONTEXT_END}  # of each node of a static tree: which node of the shape it is
    for tokens in continuations:
        node = CONTEXT_END
        for token in tokens:
            if (node, token) not in nodes:
                room = range(most_nodes) if shape.is_dynamic else shape.children(places[node])
                if len(nodes) == most_nodes or num_children[node] == len(room):
                    break
                places[len(nodes)] = room[num_children[node]]
                num_children[node] += 1
                nodes[node, token] = len(nodes)
            node = nodes[node, token]
    return Drafted(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))


def _common_prefix(known: list[int], context: Sequence[int]) -> int:
    """Length of the common prefix; the usual case, where all that is known is still there, is one C comparison."""
    if context[: len(known)] == known:
        return len(known)
    length = min(len(known), len(context))
    if known[:length] == context[:length]:
        return length
    low, high = 0, length  # the prefix of length `low` is common, that of length `high` is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if known[low:middle] == context[low:middle] else (low, middle)
    return low
