"""Stop strings in a text that grows, and in the special tokens that are left out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string in a text.

    Args:
        begin: place in the shown text where it begins.
        stop: the stop string.
        end: place in the shown text where it ends; that of its beginning where only special tokens spell it.
    """

    begin: int
    stop: str
    end: int


class StopStrings:
    """Finds stop strings in a text that grows, and holds back what may be the beginning of one.

    A special token that the text leaves out is matched by its name, as if it stood there: `</s>` stops where that token
    comes. A stop string matches such a name whole or not at all: `>` must not stop at a hidden token.

    Attributes:
        held: text that is held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        assert all(stop), "an empty stop string would stop everywhere"
        self.held = ""
        self._stop = tuple(stop)
        self._hidden: list[tuple[int, str]] = []  # names of special tokens by their place in the text

    def add(self, text: str, place: int, hidden: str) -> None:
        """Append a token's text.

        Args:
            text: that is certain from now on.
            place: where the token begins in the held text, what was provisional before it included.
            hidden: name of a special token that is left out of the text; empty for other tokens.
        """
        self.held += text
        if hidden:
            self._hidden.append((place, hidden))

    def find(self, provisional: str = "") -> StopMatch | None:
        """The first stop string in the held text and what is provisional behind it."""
        matches = [
            (begin, order, end)
            for spelling in self._spellings(self.held + provisional)
            for order, stop in enumerate(self._stop)
            for begin, end in spelling.find(stop)
        ]
        if not matches:
            return None
        begin, order, end = min(matches)
        return StopMatch(begin, self._stop[order], end)

    def release(self, passed: StopMatch | None = None) -> str:
        """Text that begins no stop string, which is held no longer.

        Args:
            passed: a stop string that may not stop yet: it and what stands before it are released.
        """
        if passed is not None:
            self._hidden = [(place, name) for place, name in self._hidden if place > passed.end]
        num_free = len(self.held)
        within = [(place, name) for place, name in self._hidden if place <= len(self.held)]
        beyond = self._hidden[len(within) :]
        for spelling in self._spellings(self.held, within):
            first = spelling.first_beginning(self._stop)
            num_free = min(num_free, spelling.shown_place(first))
        # In the last spelling, which has the names, one before the first beginning belongs to no match. It goes only
        # with the text before it: texts on both sides of a forgotten name would look like neighbours.
        starts = [begin for begin, _ in spelling.names]
        num_past = sum(begin < first and place <= num_free for begin, (place, _) in zip(starts, within, strict=False))
        if passed is not None:
            num_free = max(num_free, min(passed.end, len(self.held)))
        free, self.held = self.held[:num_free], self.held[num_free:]
        self._hidden = [(place - num_free, name) for place, name in (*within[num_past:], *beyond)]
        return free

    def _spellings(self, shown: str, hidden: Sequence[tuple[int, str]] | None = None) -> list[_Spelling]:
        """The text as it is shown and, where special tokens are left out of it, with their names."""
        names = self._hidden if hidden is None else hidden
        return [_Spelling(shown, ()), *([_Spelling(shown, names)] if names else [])]


class _Spelling:
    """A text with the names of hidden tokens at their places.

    Args:
        shown: the text without them.
        hidden: place in the shown text and name of each, in order.

    Attributes:
        text: the whole.
        names: begin and end of each name in it.
    """

    def __init__(self, shown: str, hidden: Sequence[tuple[int, str]]) -> None:
        self.text, self.names, begin = "", list[tuple[int, int]](), 0
        for place, name in hidden:
            self.text += shown[begin:place] + name
            self.names.append((len(self.text) - len(name), len(self.text)))
            begin = place
        self.text += shown[begin:]

    def find(self, stop: str) -> list[tuple[int, int]]:
        """Begin and end in the shown text of a stop string's first match; nothing without one."""
        begin = self.text.find(stop)
        while begin >= 0:
            end = begin + len(stop)
            if not (self._divides_name(begin) or self._divides_name(end)):
                return [(self.shown_place(begin), self.shown_place(end))]
            begin = self.text.find(stop, begin + 1)
        return []

    def first_beginning(self, stops: Sequence[str]) -> int:
        """The first place from which the text may become a stop string; its end where there is none."""
        first = len(self.text)
        for stop in stops:
            place = self.text.find(stop[0], max(0, len(self.text) - len(stop) + 1), first)
            while place >= 0:
                if stop.startswith(self.text[place:]) and not self._divides_name(place):
                    first = place
                    break
                place = self.text.find(stop[0], place + 1, first)
        return first

    def shown_place(self, place: int) -> int:
        """A place, which divides no name, in the shown text."""
        return place - sum(end - begin for begin, end in self.names if end <= place)

    def _divides_name(self, place: int) -> bool:
        return any(begin < place < end for begin, end in self.names)
