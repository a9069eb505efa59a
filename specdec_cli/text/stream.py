"""A sequence's text as its tokens come, and where it stops."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.text.stop_strings import StopStrings

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
        name_of: name of a special token, empty for other tokens: what a stop string may contain of one without text.
        skip_special_tokens: whether the detokenizer leaves special tokens out.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        stop_ids: Collection[int] = (),
        name_of: Callable[[int], str] = lambda token_id: "",
        skip_special_tokens: bool = True,
    ) -> None:
        self.stop: str | int | None = None
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(stop) if stop else None
        self._stop_ids = frozenset(stop_ids)
        self._name_of = name_of
        self._skip_special_tokens = skip_special_tokens

    def feed(self, token_ids: Sequence[int], num_unstoppable: int = 0) -> Released:
        """Take the next tokens; text after a stop, and the tokens there, are cut.

        Args:
            token_ids: the next tokens.
            num_unstoppable: the first so many of them complete no stop string (`min_tokens`).
        """
        assert self.stop is None, "the text has ended: nothing can follow a stop"
        parts: list[str] = []
        for num_kept, token_id in enumerate(token_ids, start=1):
            parts.append(self._take(token_id, may_stop=num_kept > num_unstoppable))
            if self.stop is not None:
                return Released("".join(parts), num_kept, self.stop)
        return Released("".join(parts), len(token_ids))

    def finish(self) -> str:
        """The tail that was held back; call once, when no token follows."""
        if isinstance(self.stop, str):
            return ""
        rest = self._detokenizer.flush()
        if self._stop_strings is None:
            return rest
        match = self._stop_strings.find(rest)
        return (self._stop_strings.held + rest)[: None if match is None else match.begin]

    def _take(self, token_id: int, may_stop: bool) -> str:
        is_end = token_id in self._stop_ids
        self.stop = token_id if is_end else None
        strings, before = self._stop_strings, self._detokenizer.provisional
        text = "" if is_end else self._detokenizer.push(token_id)
        if strings is None:
            return text
        is_hidden = is_end or self._skip_special_tokens
        strings.add(text, len(strings.held) + len(before), self._name_of(token_id) if is_hidden else "")
        # What is provisional may yet change, but if the output ends here it will not: it is searched, never shown.
        provisional = self._detokenizer.provisional
        match = strings.find(provisional)
        if match is not None and may_stop:
            self.stop = match.stop
            return (strings.held + provisional)[: match.begin]
        return "" if is_end else strings.release(match)
