"""A sequence's text as its tokens come, and where it stops."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec_cli.text.detokenize import Detokenizer


@dataclass(frozen=True, slots=True)
class Released:
    """The result of feeding tokens.

    Args:
        text: text that can be shown: it begins no stop string and no later token changes it.
        num_kept: how many of the fed tokens belong to the output; a token that completes a stop is the last.
        stop: the stop string or the stop token that ended the output, or None.
    """

    text: str
    num_kept: int
    stop: str | int | None = None


class TextStream:
    """Tokens in, text out, until a stop string or a stop token.

    Tokens are checked one by one, so their grouping into calls changes nothing. If a token completes several stop
    strings, the earliest in the text wins.

    Args:
        detokenizer: a fresh one.
        stop: strings that end the text; neither they nor what follows is part of it.
        stop_ids: tokens that end the output; they are kept as tokens and have no text.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = (), stop_ids: Collection[int] = ()) -> None:
        assert all(stop), "an empty stop string would stop everywhere"
        self.stop: str | int | None = None
        self._detokenizer = detokenizer
        self._stop_strings = tuple(stop)
        self._stop_ids = frozenset(stop_ids)
        self._held = ""

    def feed(self, token_ids: Sequence[int], num_unstoppable: int = 0) -> Released:
        """Take the next tokens; text after a stop, and the tokens there, are cut.

        Args:
            token_ids: the next tokens.
            num_unstoppable: the first so many of them complete no stop string (`min_tokens`).
        """
        assert self.stop is None, "the text has ended: nothing can follow a stop"
        parts: list[str] = []
        for num_kept, token_id in enumerate(token_ids, start=1):
            if token_id in self._stop_ids:
                self.stop = token_id
            else:
                parts.append(self._take(token_id, may_stop=num_kept > num_unstoppable))
            if self.stop is not None:
                return Released("".join(parts), num_kept, self.stop)
        return Released("".join(parts), len(token_ids))

    def finish(self) -> str:
        """The tail that was held back; call once, when no token follows."""
        if isinstance(self.stop, str):
            return ""
        text = self._held + self._detokenizer.flush()
        found = self._find(text)
        return text if found is None else text[: found[0]]

    def _take(self, token_id: int, may_stop: bool) -> str:
        text = self._detokenizer.push(token_id)
        if not self._stop_strings:
            return text
        self._held += text
        # What is provisional may yet change, but if the output ends here it will not: it is searched, never shown.
        complete = self._held + self._detokenizer.provisional
        found = self._find(complete)
        if found is not None and may_stop:
            self.stop = found[1]
            return complete[: found[0]]
        num_free = self._num_free()
        if found is not None:
            num_free = max(num_free, min(found[0] + len(found[1]), len(self._held)))
        free, self._held = self._held[:num_free], self._held[num_free:]
        return free

    def _find(self, text: str) -> tuple[int, str] | None:
        places = [(text.find(stop), i) for i, stop in enumerate(self._stop_strings)]
        first, i = min((place for place in places if place[0] >= 0), default=(-1, 0))
        return None if first < 0 else (first, self._stop_strings[i])

    def _num_free(self) -> int:
        """Characters of the held text before the first place where a stop string may be beginning."""
        first = len(self._held)
        for stop in self._stop_strings:
            place = self._held.find(stop[0], max(0, len(self._held) - len(stop) + 1), first)
            while place >= 0:
                if stop.startswith(self._held[place:]):
                    first = place
                    break
                place = self._held.find(stop[0], place + 1, first)
        return first
