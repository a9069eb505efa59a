"""Reads a given text: the output is expected to follow it, for example a file that is being edited.

A pointer walks through the predicted tokens with the output. Where the output leaves the prediction, the pointer goes
to where the newest tokens of the output stand in the prediction (longest n-gram first; the next such place ahead,
otherwise the last one before). It is a fold over the output's tokens, so a guess depends on the context alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from specdec_cli.drafted import Drafted
from specdec_cli.drafters.contract import DraftRow, Guesses, Resources, WithoutModel
from specdec_cli.errors import UsageError


@dataclass
class Drafter(WithoutModel):
    """Guesses the continuation of a predicted text.

    Args:
        text: the predicted text.
        max: longest n-gram of the output to look for in it after the output has left it.
        min: shortest such n-gram.
        per_request: requests bring their own predictions; one that brings none is decoded without a draft.
    """

    text: str = ""
    max: int = 4
    min: int = 1
    per_request: bool = False

    def __post_init__(self) -> None:
        """Refuse n-gram lengths out of range."""
        if not 1 <= self.min <= 64:
            raise UsageError(f"`min` of `prediction` must be from 1 to 64, not `{self.min}`")
        if not self.min <= self.max <= 64:
            raise UsageError(f"`max` of `prediction` must be from min (`{self.min}`) to 64, not `{self.max}`")
        self._text: _Text | None = None
        self._pointers: dict[int, _Pointer] = {}

    def load(self, resources: Resources) -> None:
        """Tokenise the prediction and note where each of its n-grams ends."""
        if not self.text and self.per_request:
            return
        if not self.text:
            raise UsageError("the draft `prediction` has no text to read", "give it with --prediction")
        if resources.encode is None:
            raise UsageError("the draft `prediction` needs a tokenizer, and the target has none")
        predicted = _encode_bare(resources.encode, self.text)
        assert all(token < resources.num_tokens for token in predicted), "a tokenizer knows its own tokens only"
        self._text = _Text(predicted, self.min, self.max)

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """The predicted tokens from where the output stands in the prediction."""
        return [Guesses(Drafted.chain(self._guess(row))) for row in rows]

    def _guess(self, row: DraftRow) -> list[int]:
        output = row.context[row.num_prompt_tokens :]
        pointer = self._pointers.get(row.handle)
        if pointer is None or output[: len(pointer.output)] != pointer.output:
            text = self._text if row.prediction is None else _Text(row.prediction, self.min, self.max)
            if text is None:
                return []
            pointer = self._pointers[row.handle] = _Pointer(text)
        for token in output[len(pointer.output) :]:
            pointer.follow(token)
        return pointer.next(row.k)

    def release(self, handle: int) -> None:
        """Forget a sequence."""
        self._pointers.pop(handle, None)


class _Text:
    """A predicted text's tokens, and where each of its n-grams ends, once that is asked for."""

    def __init__(self, tokens: Sequence[int], shortest: int, longest: int) -> None:
        self.tokens = list(tokens)
        self.lengths = range(longest, shortest - 1, -1)

    @cached_property
    def places(self) -> dict[tuple[int, ...], list[int]]:
        ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(1, len(self.tokens) + 1):
            for length in self.lengths:
                if length <= end:
                    ends.setdefault(tuple(self.tokens[end - length : end]), []).append(end)
        return ends


@dataclass
class _Pointer:
    """Where an output stands in the prediction: the next token's place, and whether the output agrees with it."""

    text: _Text
    output: list[int] = field(default_factory=list)
    place: int = 0
    is_aligned: bool = True

    def follow(self, token: int) -> None:
        """Go on by one token of the output."""
        self.output.append(token)
        tokens = self.text.tokens
        if self.is_aligned and self.place < len(tokens) and tokens[self.place] == token:
            self.place += 1
            return
        self.is_aligned = False
        for length in self.text.lengths:
            places = self.text.places.get(tuple(self.output[-length:])) if length <= len(self.output) else None
            if places:
                self.place = places[min(bisect_left(places, self.place), len(places) - 1)]
                self.is_aligned = True
                return

    def next(self, k: int) -> list[int]:
        """The k tokens that follow, or none where the output has left the text."""
        return self.text.tokens[self.place : self.place + k] if self.is_aligned else []


def _encode_bare(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Token ids without what the tokenizer puts around every text (a beginning token, an end token)."""
    around = set(encode(""))
    tokens = encode(text)
    while tokens and tokens[0] in around:
        tokens = tokens[1:]
    while tokens and tokens[-1] in around:
        tokens = tokens[:-1]
    return tokens
