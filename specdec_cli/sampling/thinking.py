"""A grammar that begins where a model's thinking ends: until then an output may say anything but end.

Thinking is recognized in the text, so markers of one token or several are the same. A thought that was
not begun by the prompt may begin the output or be left out: both are allowed until one of them is certain.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from specdec_cli.sampling.grammar import BoolArray, Grammar, MaskBudget, Matcher, TokenizerLike

Begins = Literal["thinking", "undecided", "content"]
"""How an output begins: inside a thought, perhaps with one, or without."""


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """The texts around a model's thinking."""

    start: str
    end: str


def after_thinking(grammar: Grammar, markers: ThinkingMarkers, begins: Begins) -> Grammar:
    """The grammar of an output that may think first.

    Args:
        grammar: of what follows the thinking; compiled.
        markers: around it.
        begins: how the output begins.
    """
    if begins == "content":
        return grammar
    known = (grammar.kind, grammar.tokenizer, grammar.warnings, grammar._prototype, grammar._end, grammar._budget)
    return _ThinkingGrammar(*known, _vocabulary(grammar.tokenizer, markers), begins)


class _Vocabulary:
    """The tokens that end a thought too late or may continue its marker."""

    def __init__(self, tokenizer: Any, markers: ThinkingMarkers) -> None:
        self.markers = markers
        self._tokenizer = tokenizer
        self._overshooting: dict[str, list[int]] = {}
        self._continuing: dict[str, list[int]] = {}

    def text(self, token_id: int) -> str:
        """A token's text as it reads inside a text."""
        return str(self._tokenizer.piece(token_id))

    def overshooting(self, held: str) -> list[int]:
        """Tokens that would end the thought and say more, which no grammar would see."""
        if held not in self._overshooting:
            end = self.markers.end
            self._overshooting[held] = [
                token
                for token, text in self._with_text(end[-1])
                if 0 <= (held + text).find(end) < len(held + text) - len(end)
            ]
        return self._overshooting[held]

    def continuing(self, seen: str) -> list[int]:
        """Tokens that go on with the marker that begins a thought."""
        if seen not in self._continuing:
            left = self.markers.start[len(seen) :]
            self._continuing[seen] = [
                token
                for token, text in self._with_text(left[0])
                if text and (left.startswith(text) or text.startswith(left))
            ]
        return self._continuing[seen]

    def _with_text(self, char: str) -> list[tuple[int, str]]:
        """Tokens whose text has a character, with it; ASCII is written as itself in every vocabulary."""
        vocabulary: dict[str, int] = self._tokenizer.vocabulary
        return [(token, self.text(token)) for word, token in vocabulary.items() if char in word]


_vocabularies: WeakKeyDictionary[TokenizerLike, dict[ThinkingMarkers, _Vocabulary]] = WeakKeyDictionary()
_lock = Lock()


def _vocabulary(tokenizer: TokenizerLike, markers: ThinkingMarkers) -> _Vocabulary:
    """Of a tokenizer and its markers; made once for each."""
    with _lock:
        known = _vocabularies.setdefault(tokenizer, {})
        return known.setdefault(markers, _Vocabulary(tokenizer, markers))


@dataclass(frozen=True, slots=True, eq=False)
class _ThinkingGrammar(Grammar):
    """A grammar that every output follows after its thinking."""

    vocabulary: _Vocabulary
    begins: Begins

    def start(self, num_tokens: int, stop_ids: Collection[int], eos_ids: Collection[int] = ()) -> Matcher:
        """Follow a new output."""
        never = frozenset({*eos_ids, *self.tokenizer.eos_token_ids})
        follower = self._prototype.deep_copy()
        return _ThinkingMatcher(
            follower, self._end, num_tokens, frozenset(stop_ids), never, self._budget, self.vocabulary, self.begins
        )


class _ThinkingMatcher(Matcher):
    """One output's place: in its thought, before it is known whether it thinks, or in the grammar."""

    def __init__(
        self,
        follower: Any,
        end: int,
        num_tokens: int,
        stop_ids: frozenset[int],
        never: frozenset[int],
        budget: MaskBudget,
        vocabulary: _Vocabulary,
        begins: Begins,
    ) -> None:
        self._fresh = follower.deep_copy()
        super().__init__(follower, end, num_tokens, stop_ids, never, budget)
        self._vocabulary = vocabulary
        self._phase = begins
        self._text = ""  # of the marker that is being said
        self._may_be_content = True

    @property
    def allowed(self) -> BoolArray:
        """[V] bool, the tokens that may come next."""
        if self._phase == "content":
            return super().allowed
        if self._phase == "thinking":
            mask = np.ones(self._num_tokens, dtype=np.bool_)
            for ids in (self._stops, self._never, self._vocabulary.overshooting(self._text)):
                mask[[token for token in ids if token < self._num_tokens]] = False
            return mask
        mask = super().allowed.copy() if self._may_be_content else np.zeros(self._num_tokens, dtype=np.bool_)
        mask[[token for token in self._vocabulary.continuing(self._text) if token < self._num_tokens]] = True
        return mask

    def accept(self, tokens: Sequence[int]) -> int:
        """Follow emitted tokens up to and with the first after which nothing may be emitted."""
        for i, token in enumerate(tokens):
            if self._phase == "content":
                return i + super().accept(tokens[i:])
            if self._phase == "thinking":
                self._think(self._vocabulary.text(token))
            elif super_ended := self._decide(token):
                return i + super_ended
        return len(tokens)

    def _think(self, said: str) -> None:
        """Take text of a thought; its end begins the grammar."""
        text, end = self._text + said, self._vocabulary.markers.end
        if end in text:
            self._phase, self._text = "content", ""
            return
        lengths = range(min(len(end) - 1, len(text)), 0, -1)
        self._text = next((text[-num:] for num in lengths if end.startswith(text[-num:])), "")

    def _decide(self, token: int) -> int:
        """Take a token of which it is not known whether it begins a thought; 1 where nothing may follow it."""
        text, start = self._text + self._vocabulary.text(token), self._vocabulary.markers.start
        if text.startswith(start):
            self._follower = self._fresh.deep_copy()
            self._allowed, self.is_finished = self._mask(self._follower)
            self._phase, self._text = "thinking", ""
            self._think(text[len(start) :])
            return 0
        is_content = self._may_be_content and bool(self._allowed is not None and self._allowed[token])
        if start.startswith(text):
            self._text, self._may_be_content = text, is_content
        else:
            self._phase = "content"
        ended = super().accept([token]) if is_content else 0
        return ended if self.is_finished or token in self._stop_ids or self._allowed is None else 0
