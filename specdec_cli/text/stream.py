"""A sequence's text as its tokens come, and where it stops. The parts joined are exactly the decoded whole.

What a token reads as depends on its neighbours: characters span tokens, byte-fallback runs are judged as a whole, and
the first token of a text loses its space. A detokenizer gives out text only when no later token can change it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specdec_cli.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from specdec_cli.text.tokenizer import Tokenizer


_REPLACEMENT = "\ufffd"
_MAX_PENDING = 32  # tokens; an unknown decoder that never settles must not make each token dearer than the last


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


class Detokenizer(Protocol):
    """Decodes one text incrementally.

    Attributes:
        provisional: characters that are complete but that a later token could still turn into others.
    """

    provisional: str

    def push(self, token_id: int) -> str:
        """Take a token; the text that is now certain."""
        ...

    def flush(self) -> str:
        """The rest, where no token follows: an incomplete character shows as U+FFFD."""
        ...


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's byte alphabet: visible bytes stand for themselves, the others for the letters from 256 on, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_LETTER = _byte_of_letter()


class TokenBytes(dict[int, bytes]):
    """Bytes that each token of a byte-level tokenizer adds to a text, computed when they are first looked up.

    Args:
        token_of: the token of an id that is not negative; None where there is none, which adds nothing.
        left_out: ids of the tokens that add nothing.
    """

    def __init__(self, token_of: Callable[[int], str | None], left_out: Collection[int] = ()) -> None:
        super().__init__()
        self._token_of = token_of
        self._left_out = left_out

    def __missing__(self, token_id: int) -> bytes:
        """An added token with letters outside the alphabet stands for itself."""
        is_shown = token_id >= 0 and token_id not in self._left_out
        token = (self._token_of(token_id) if is_shown else None) or ""
        try:
            self[token_id] = bytes([_BYTE_OF_LETTER[letter] for letter in token])
        except KeyError:
            self[token_id] = token.encode()
        return self[token_id]


class ByteLevelDetokenizer:
    """For byte-level tokenizers (GPT-2, Llama 3, Qwen): the text is the tokens' bytes, nothing else."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self.provisional = ""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take a token; the text that is now certain."""
        return self._decoder.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """The rest: an incomplete character shows as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other tokenizer: decodes the newest tokens behind the last one whose text was given out.

    That one token of context takes the rules about a text's beginning off the new ones. A run of byte-fallback tokens
    is waited for: its decoder shows the whole run as U+FFFD if one byte of it is wrong.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.provisional = ""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._run = _ByteRun()

    def push(self, token_id: int) -> str:
        """Take a token; the text that is now certain."""
        if self._tokenizer.is_silent(token_id, self._skip_special_tokens):
            return ""
        byte = self._tokenizer.byte_tokens.get(token_id)
        if byte is not None:
            self._extend_run(byte)
            self._pending.append(token_id)
            return ""
        self._pending.append(token_id)
        self.provisional = ""
        text = self._window_text()
        num_waiting = len(self._pending) - self._run.num_bytes
        self._run = _ByteRun() if self._run.num_bytes else self._run
        if self._is_open(text) and num_waiting < _MAX_PENDING:
            return ""
        return self._release(text, num_context=1 if num_waiting < _MAX_PENDING else 4)

    def flush(self) -> str:
        """The rest, as the decoder shows it at the end of a text."""
        self.provisional = ""
        self._run = _ByteRun()
        return self._release(self._window_text(), num_context=1) if self._pending else ""

    def _window_text(self) -> str:
        return self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)

    def _is_open(self, text: str) -> bool:
        """Whether the next token may still change the window's last characters."""
        return text.endswith(_REPLACEMENT) or text == self._context_text or not text.startswith(self._context_text)

    def _release(self, text: str, num_context: int) -> str:
        new = text[len(self._context_text) :]
        self._context, self._pending = self._pending[-num_context:], []
        if num_context == 1:
            self._context_text = self._tokenizer.text_of(self._context[0])
        else:
            self._context_text = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return new

    def _extend_run(self, byte: int) -> None:
        is_run_alone = len(self._pending) == self._run.num_bytes
        text = self._run.add(byte)
        if not self._context and self._tokenizer.strips_first_space:
            text = text.removeprefix(" ")
        self.provisional = text if is_run_alone else ""


class _ByteRun:
    """Consecutive byte-fallback tokens: their complete characters, none once a byte is wrong."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._is_valid = True

    def add(self, byte: int) -> str:
        self.num_bytes += 1
        if self._is_valid:
            try:
                self._text += self._decoder.decode(bytes([byte]))
            except UnicodeDecodeError:
                self._is_valid, self._text = False, ""
        return self._text
