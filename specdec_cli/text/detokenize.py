"""Tokens to text one by one, such that the parts joined are exactly the decoded whole.

What a token reads as depends on its neighbours: characters span tokens, byte-fallback runs are judged as a whole, and
the first token of a text loses its space. A decoder here gives out text only when no later token can change it.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from specdec_cli.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 32  # tokens; an unknown decoder that never settles must not make each token dearer than the last


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


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; an added token with letters outside the alphabet stands for itself."""
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:
        return token.encode()


class ByteLevelDetokenizer:
    """For byte-level tokenizers (GPT-2, Llama 3, Qwen): the text is the tokens' bytes, nothing else."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.provisional = ""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take a token; the text that is now certain."""
        if self._tokenizer.is_silent(token_id, self._skip_special_tokens):
            return ""
        return self._decoder.decode(self._tokenizer.bytes_of(token_id))

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
