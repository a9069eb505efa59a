"""Log-probabilities in the shapes of OpenAI's two APIs; a chosen token's is the very number among the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec_cli.events import IMPOSSIBLE, TokenLogprob

if TYPE_CHECKING:
    from specdec_cli.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenWords:
    """How tokens are written.

    Args:
        tokenizer: None writes `token_id:N`.
        as_ids: write `token_id:N` always.
        skip_special: special tokens take no room in the text.
    """

    tokenizer: Tokenizer | None
    as_ids: bool = False
    skip_special: bool = True

    def chat(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """A chat choice's `logprobs`."""
        content = [
            self._entry(chosen.token_id, chosen.logprob)
            | {"top_logprobs": [self._entry(token, value) for token, value in chosen.top]}
            for chosen in logprobs
        ]
        return {"content": content, "refusal": None}

    def token(self, token_id: int) -> str:
        """A token's text; part of a character is written as its bytes, so that no two tokens read alike for it."""
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        text = self.tokenizer.piece(token_id)
        if "\ufffd" in text:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.tokenizer.piece_bytes(token_id))
        return text

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        known = self.tokenizer
        piece_bytes = None if known is None else list(known.piece_bytes(token_id))
        return {"token": self.token(token_id), "logprob": max(logprob, IMPOSSIBLE), "bytes": piece_bytes}

    def best(self, chosen: TokenLogprob) -> dict[str, float]:
        """A completion token's `top_logprobs`: the best first; of two that read alike the better; the chosen always."""
        best: dict[str, float] = {}
        for token, value in (*chosen.top, (chosen.token_id, chosen.logprob)):
            best.setdefault(self.token(token), max(value, IMPOSSIBLE))
        return best


@dataclass(slots=True)
class CompletionLogprobs:
    """A completion choice's `logprobs`, growing with its tokens.

    Args:
        words: how tokens are written.
        offset: characters before the next token.
    """

    words: TokenWords
    offset: int = 0
    _pushed: Any = field(default=None, repr=False)

    def prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], echoed: str) -> dict[str, Any]:
        """Log-probabilities of an echoed prompt, whose text is `echoed`: nothing predicts its first token."""
        first = {"tokens": [self.words.token(token_ids[0])], "token_logprobs": [None], "top_logprobs": [None]}
        rest = self._columns(logprobs)
        offsets = self._offsets_in(token_ids, echoed)
        return {name: first[name] + rest[name] for name in first} | {"text_offset": offsets}

    def output(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities of the next emitted tokens."""
        return self._columns(logprobs) | {"text_offset": self._offsets([chosen.token_id for chosen in logprobs])}

    def _columns(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [self.words.token(chosen.token_id) for chosen in logprobs],
            "token_logprobs": [max(chosen.logprob, IMPOSSIBLE) for chosen in logprobs],
            "top_logprobs": [self.words.best(chosen) for chosen in logprobs],
        }

    def _offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Offset at which each token begins in the text."""
        tokenizer = self.words.tokenizer
        if tokenizer is None:
            return [0] * len(token_ids)
        if self._pushed is None:
            self._pushed = tokenizer.detokenizer(self.words.skip_special)
        offsets = []
        for token in token_ids:
            offsets.append(self.offset + len(self._pushed.provisional))
            self.offset += len(self._pushed.push(token))
        return offsets

    def _offsets_in(self, token_ids: Sequence[int], echoed: str) -> list[int]:
        """Where each token of an echoed prompt begins; a special one has room only where the text spells it out."""
        tokenizer = self.words.tokenizer
        if tokenizer is None:
            return [0] * len(token_ids)
        offsets, offset, plain = [], 0, tokenizer.detokenizer()
        for token in token_ids:
            if token in tokenizer.special_ids:
                offset, plain = offset + len(plain.flush()), tokenizer.detokenizer()
                name = tokenizer.text_of(token)
                offsets.append(min(offset, len(echoed)))
                offset += len(name) if echoed.startswith(name, offset) else 0
            else:
                offsets.append(min(offset + len(plain.provisional), len(echoed)))
                piece = plain.push(token)
                has_space = not echoed.startswith(piece, offset) and echoed.startswith(f" {piece}", offset)
                offset += len(piece) + has_space  # decoders of sentencepiece put one after a special token
        return offsets


def joined(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    """Two `logprobs` of one completion choice, one after the other."""
    return second if first is None else {name: first[name] + second[name] for name in first}
