"""Contexts of one tokenizer as contexts of another, step by step as they grow.

The text between two special tokens is cut into pieces (`text.pieces`); a whole piece is encoded once, the last one
again with every step. So the translation is a function of the context alone, however the context came about. A special
token becomes the one of the same name or role, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec_cli.text.pieces import PieceEncoder, num_incomplete, piece_starts
from specdec_cli.text.shared_vocabulary import SharedVocabulary
from specdec_cli.text.tokenizer import Tokenizer


class Translator:
    """Translates contexts from a target's tokens to a draft's, and guesses from the draft's to the target's."""

    def __init__(self, target: Tokenizer, draft: Tokenizer, shared: SharedVocabulary) -> None:
        self.target, self.draft, self.shared = target, draft, shared
        self.to_target, self.to_draft = PieceEncoder(target), PieceEncoder(draft)
        self.prefix = _prefix(draft)
        self.unknown = target.special_token("unk_token")

    def start(self) -> Translation:
        """The translation of one sequence, empty yet."""
        return Translation(self)

    def guessed(self, translation: Translation, tokens: Sequence[int]) -> list[int]:
        """The text of a draft's guess behind a context, in the target's tokens.

        Args:
            translation: of the context, as `follow` left it.
            tokens: the guess in the draft's tokens; its text ends at a special one.

        Returns:
            Tokens that continue the context's; none where the guess does not fit the context's last bytes, or where the
            target's tokenizer would have cut them in another place.
        """
        added, begins, special = bytearray(), translation.begins, []
        for token in tokens:
            if token in self.draft.special_ids:
                special = [self.shared.special_of_draft[token]] if token in self.shared.special_of_draft else []
                break
            added += self.draft.added_bytes(token, begins)
            begins = False
        encoded = self._encoded(translation, added)
        return [*encoded, *special] if encoded or not added else []

    def _encoded(self, translation: Translation, added: bytearray) -> list[int]:
        """A guessed text in the target's tokens."""
        before = translation.open_text
        begins = translation.begins_piece if before else translation.begins
        num_whole = len(before) - num_incomplete(before)
        text = bytes(before[:num_whole] + added)
        if not text.startswith(before):
            return []
        text = text[: len(text) - num_incomplete(text)]
        if len(text) <= len(before):
            return []
        tokens: list[int] = []
        starts = [0, *piece_starts(text, 0, 1)]
        for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
            if end <= len(before):
                continue
            piece, first = text[start:end], begins and start == 0
            if start >= len(before):
                tokens += self.to_target.encode(piece, first)
            else:
                tokens += self._rest(piece, len(before) - start, first, is_whole=num_whole == len(before))
                if not tokens:
                    return []
        return tokens

    def _rest(self, piece: bytes, num_before: int, begins: bool, is_whole: bool) -> Sequence[int]:
        """The tokens of a piece behind its first bytes, which are the context's.

        Args:
            piece: UTF-8.
            num_before: bytes of it that the context has.
            begins: whether the piece begins a text.
            is_whole: whether the context ends behind a character.
        """
        tokens, length = self.to_target.encode(piece, begins), 0
        for place, token in enumerate(tokens):
            added = self.target.added_bytes(token, begins and place == 0)
            if length == num_before and added:
                return tokens[place:]
            if length > num_before or piece[length : length + len(added)] != added:
                break
            length += len(added)
        return self.to_target.encode(piece[num_before:], begins=False) if is_whole else ()


def _prefix(draft: Tokenizer) -> list[int]:
    """The tokens that the draft's tokenizer puts before every text."""
    bare, whole = draft.encode("a", add_special_tokens=False), draft.encode("a")
    first = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return whole[:first]


@dataclass(slots=True)
class _TextPiece:
    """A piece of the context's text, or one special token.

    Args:
        token: place in the context of the token in which it begins.
        begin: its first byte's place in the text.
        num_before: draft tokens before it.
        begins: whether it begins a text: the context's, or one behind a special token.
        is_special: whether it is a special token, which has no text.
    """

    token: int
    begin: int
    num_before: int
    begins: bool
    is_special: bool = False


@dataclass(slots=True)
class Translation:
    """One sequence's context in the draft's tokens.

    Args:
        translator: whose sequence it is.
        tokens: the context, in the target's tokens.
        translated: the same in the draft's. Characters that the context has not completed are not in it.
    """

    translator: Translator
    tokens: list[int] = field(default_factory=list)
    translated: list[int] = field(default_factory=list)
    _text: bytearray = field(default_factory=bytearray)
    _ends: list[int] = field(default_factory=list)
    _pieces: list[_TextPiece] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with what the draft's tokenizer puts before every text."""
        self.translated += self.translator.prefix

    @property
    def begins(self) -> bool:
        """Whether what follows begins a text."""
        return not self._pieces or self._pieces[-1].is_special

    @property
    def open_text(self) -> bytes:
        """The bytes of the last piece, which what follows may continue."""
        return b"" if self.begins else bytes(self._text[self._pieces[-1].begin :])

    @property
    def begins_piece(self) -> bool:
        """Whether the last piece begins a text."""
        return self.begins or self._pieces[-1].begins

    def follow(self, context: Sequence[int]) -> list[int]:
        """The context in the draft's tokens; a list that the next call changes.

        Args:
            context: any; what it shares with the last one is not translated again.
        """
        num = _num_common(self.tokens, context)
        if num < len(self.tokens):
            self._cut(num)
        for token in context[num:]:
            self._push(token)
        self._close()
        return self.translated

    def num_before(self, num: int) -> int:
        """How many of the context's tokens stand before the piece that the draft's token `num` is in."""
        return max((piece.token for piece in self._pieces if piece.num_before <= num), default=0)

    def _cut(self, num: int) -> None:
        """Forget all but the first tokens."""
        while self._pieces and self._pieces[-1].token >= num:
            del self.translated[self._pieces.pop().num_before :]
        del self.tokens[num:], self._ends[num:]
        del self._text[self._ends[-1] if self._ends else 0 :]

    def _push(self, token: int) -> None:
        place, target = len(self.tokens), self.translator.target
        self.tokens.append(token)
        first = len(self._text)
        if target.is_silent(token, skip_special_tokens=True):
            if token != self.translator.unknown:  # which stands for text, and ends none
                self._close()
                self._open(place, first, is_special=True)
            self._ends.append(first)
            return
        self._text += target.added_bytes(token, self.begins)
        if self.begins:
            self._open(place, first)
        self._ends.append(len(self._text))
        for start in piece_starts(self._text, self._pieces[-1].begin, max(first, self._pieces[-1].begin + 1)):
            self._close(start)
            self._open(place, start)

    def _open(self, token: int, begin: int, is_special: bool = False) -> None:
        """Begin a piece."""
        self._pieces.append(_TextPiece(token, begin, len(self.translated), self.begins or is_special, is_special))
        if is_special:
            self.translated += self._special(token)

    def _special(self, place: int) -> Sequence[int]:
        """A special token in the draft's tokens; a leading one that the draft's own stands for is not repeated."""
        translator, token = self.translator, self.tokens[place]
        if place == 0 and token == translator.target.bos_token_id:
            return ()
        draft_token = translator.shared.special_of_target.get(token)
        return () if draft_token is None else (draft_token,)

    def _close(self, end: int | None = None) -> None:
        """Translate the last piece, up to a place in the text."""
        if self.begins:
            return
        piece = self._pieces[-1]
        text = bytes(self._text[piece.begin : end])
        whole = text[: len(text) - num_incomplete(text)]
        self.translated[piece.num_before :] = self.translator.to_draft.encode(whole, piece.begins)


def _num_common(tokens: list[int], context: Sequence[int]) -> int:
    num = min(len(tokens), len(context))
    if (tokens if num == len(tokens) else tokens[:num]) == context[:num]:
        return num
    return next(i for i in range(num) if tokens[i] != context[i])
