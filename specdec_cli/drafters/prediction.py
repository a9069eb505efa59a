"""Reads a given text: the output is expected to follow it, for example a file that is being edited.

A pointer walks through the predicted tokens with the output. Where the output leaves the prediction, the pointer goes
to where the newest tokens of the output stand in the prediction (longest n-gram first; the next such place ahead,
otherwise the last one before). It is a fold over the output's tokens, so a guess depends on the context alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec_cli.drafters.contract import DraftRow, Guesses, Resources
from specdec_cli.errors import UsageError


@dataclass
class Drafter:
    """Guesses the continuation of a predicted text.

    Args:
        text: the predicted text.
        max: longest n-gram of the output to look for in it after the output has left it.
        min: shortest such n-gram.
    """

    text: str = ""
    max: int = 4
    min: int = 1

    def __post_init__(self) -> None:
        """Refuse n-gram lengths out of range."""
        if not 1 <= self.min <= 64:
            raise UsageError(f"`min` of `prediction` must be from 1 to 64, not `{self.min}`")
        if not self.min <= self.max <= 64:
            raise UsageError(f"`max` of `prediction` must be from min (`{self.min}`) to 64, not `{self.max}`")
        self._predicted: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._pointers: dict[int, _Pointer] = {}

    @property
    def max_context(self) -> int | None:
        """No limit."""
        return None

    def load(self, resources: Resources) -> None:
        """Tokenise the prediction and note where each of its n-grams ends."""
        if not self.text:
            raise UsageError("the draft `prediction` has no text to read", "give it with --prediction")
        if resources.encode is None:
            raise UsageError("the draft `prediction` needs a tokenizer, and the target has none")
        self._predicted = _encode_bare(resources.encode, self.text)
        assert all(token < resources.num_tokens for token in self._predicted), "a tokenizer knows its own tokens only"
        self._places = {}
        for end in range(1, len(self._predicted) + 1):
            for length in range(self.min, min(self.max, end) + 1):
                self._places.setdefault(tuple(self._predicted[end - length : end]), []).append(end)

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """The predicted tokens from where the output stands in the prediction."""
        return [Guesses(self._guess(row)) for row in rows]

    def _guess(self, row: DraftRow) -> list[int]:
        output = row.context[row.num_prompt_tokens :]
        pointer = self._pointers.setdefault(row.handle, _Pointer())
        if output[: len(pointer.output)] != pointer.output:
            pointer = self._pointers[row.handle] = _Pointer()
        for token in output[len(pointer.output) :]:
            pointer.output.append(token)
            self._advance(pointer, token)
        return self._predicted[pointer.place : pointer.place + row.k] if pointer.is_aligned else []

    def _advance(self, pointer: _Pointer, token: int) -> None:
        place = pointer.place
        if pointer.is_aligned and place < len(self._predicted) and self._predicted[place] == token:
            pointer.place += 1
            return
        pointer.is_aligned = False
        for length in range(min(self.max, len(pointer.output)), self.min - 1, -1):
            places = self._places.get(tuple(pointer.output[-length:]))
            if places:
                ahead = bisect_left(places, place)
                pointer.place = places[min(ahead, len(places) - 1)]
                pointer.is_aligned = True
                return

    def release(self, handle: int) -> None:
        """Forget a sequence."""
        self._pointers.pop(handle, None)


@dataclass
class _Pointer:
    """Where an output stands in the prediction: the next token's place, and whether the output agrees with it."""

    output: list[int] = field(default_factory=list)
    place: int = 0
    is_aligned: bool = True


def _encode_bare(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Token ids without what the tokenizer puts around every text (a beginning token, an end token)."""
    around = set(encode(""))
    tokens = encode(text)
    while tokens and tokens[0] in around:
        tokens = tokens[1:]
    while tokens and tokens[-1] in around:
        tokens = tokens[:-1]
    return tokens
