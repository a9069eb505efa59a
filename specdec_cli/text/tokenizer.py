"""A tokenizer as the rest of the house sees it: wraps any transformers tokenizer object without importing any."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from specdec_cli.errors import UsageError
from specdec_cli.text.overlap import Overlap, overlap
from specdec_cli.text.stream import ByteLevelDetokenizer, Detokenizer, TextStream, TokenBytes, WindowDetokenizer

if TYPE_CHECKING:
    from specdec_cli.text.template import TemplateReads

_TEMPLATE_ERRORS = (
    TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, SyntaxError, MemoryError,
)  # fmt: skip
"""Errors of chat templates over messages that they do not support, besides jinja2's own."""


_PIECE_CHARS = 8192
"""Length of the pieces in which the tokens of a long text are counted."""

_CORRECT = "correct the template, or choose another one with --chat-template"


class Tokenizer:
    """Text to token ids and back.

    Text is what the tokens say: the spaces are never cleaned up afterwards (transformers'
    `clean_up_tokenization_spaces`), so a streamed text and the decoded whole are the same text.

    Args:
        hf_tokenizer: a tokenizer object of transformers, with or without a fast backend.
        chat_template: in place of the tokenizer's own.
        chat_variables: what conversations pass to the chat template beside their own variables.
    """

    def __init__(
        self,
        hf_tokenizer: Any,
        chat_template: str | None = None,
        chat_variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.hf = hf_tokenizer
        self.chat_variables = dict(chat_variables or {})
        # Its tables are asked token by token: a copy of a large vocabulary takes long to make, and 30 MB.
        self._backend: Any = getattr(hf_tokenizer, "backend_tokenizer", None)
        self._is_template_given = chat_template is not None
        if chat_template is not None:
            self.hf.chat_template = chat_template
        self._texts: dict[int, str] = {}
        self._added: dict[tuple[int, bool], bytes] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens are added as the tokenizer does by default."""
        return [int(i) for i in self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)]

    def exceeds(self, text: str, num_tokens: int) -> bool:
        """Whether a text certainly has more than so many tokens, at the cost of tokenizing about twice as many.

        Tokens are counted piece by piece: memory stays that of a piece, and counting ends once the answer is known. A
        cut splits a word into more tokens than it has, so the pieces must have twice as many, and two more for each.
        """
        if len(text) <= max(num_tokens, _PIECE_CHARS):
            return False
        num_found = 0
        for i, begin in enumerate(range(0, len(text), _PIECE_CHARS), start=1):
            num_found += len(self.encode(text[begin : begin + _PIECE_CHARS], add_special_tokens=False))
            if num_found > 2 * (num_tokens + i):
                return True
        return False

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary (a padded one's) have none."""
        known = [i for i in token_ids if self._token(i) is not None]
        text: str = self.hf.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Every token with its id, added tokens included."""
        return dict(self.hf.get_vocab())

    @cached_property
    def num_tokens(self) -> int:
        """V, the size of the real vocabulary: the largest id + 1, whatever the embedding was padded to."""
        known: int | None = getattr(self.hf, "num_tokens", None)
        if known is not None:
            return known
        if self._backend is not None:
            size: int = self._backend.get_vocab_size()
            if all(self._backend.id_to_token(i) is not None for i in range(size)):  # so many tokens leave no larger id
                return size
        return max(self.vocabulary.values(), default=-1) + 1

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, or None."""
        token_id = getattr(self.hf, "bos_token_id", None)
        return None if token_id is None else int(token_id)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a text as the tokenizer knows them; a model's generation config may name more."""
        token_id = getattr(self.hf, "eos_token_id", None)
        if token_id is None:
            return ()
        return tuple(token_id) if isinstance(token_id, list | tuple) else (int(token_id),)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be put into text."""
        return bool(getattr(self.hf, "chat_template", None))

    @property
    def is_stand_in(self) -> bool:
        """Whether the model has no tokenizer, and text is read as its bytes (`load_format: dummy`)."""
        return bool(getattr(self.hf, "is_stand_in", False))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `skip_special_tokens` leaves out of the text."""
        if self._backend is None:
            return frozenset(self.hf.all_special_ids)
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation by the tokenizer's chat template, which brings its own special tokens.

        Args:
            messages: `{"role": ..., "content": ...}`, oldest first, as OpenAI's API has them: content is text or a list
                of text parts, arguments of calls are JSON as text or as an object.
            add_generation_prompt: end with the head of the assistant's turn.
            tools: functions that the model may call, as OpenAI describes them; the template must know of tools.
            continue_final_message: leave the last turn open, so that the model goes on with it.
            variables: further names that the template reads, such as `enable_thinking`.

        Raises:
            UsageError: the tokenizer has no chat template, or the template refuses the messages.
        """
        from specdec_cli.text.conversation import render_conversation

        text = render_conversation(
            self,
            messages,
            add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        if not text:
            raise UsageError(f"the chat template of `{self.template_owner}` makes no text of these messages", _CORRECT)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Text that the chat template makes of messages as they are; arguments and errors as `chat`."""
        import jinja2

        from specdec_cli.template_limits import TemplateLimitError

        if not self.has_chat_template:
            raise UsageError(
                f"the tokenizer of `{self.name}` has no chat template",
                "use a chat model, or give a template with --chat-template",
            )
        try:
            text: str = self.hf.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **self.chat_variables | dict(variables or {}),
            )
        except jinja2.TemplateSyntaxError as error:
            raise self._broken_template(error) from error
        except TemplateLimitError as error:
            raise UsageError(
                f"the chat template of `{self.template_owner}` costs too much to render: {error}",
                "use another template (--chat-template), or a copy of the model that you trust",
            ) from error
        except (jinja2.TemplateError, *_TEMPLATE_ERRORS) as error:
            message = f"the chat template of `{self.template_owner}` refuses these messages: {error}"
            raise UsageError(message, _template_hint(error, messages)) from error
        return text

    @property
    def chat_template(self) -> str:
        """The chat template's text, of a conversation without tools; empty where there is none."""
        return self._template(has_tools=False)

    def template_reads(self, has_tools: bool = False) -> TemplateReads:
        """The names that a conversation's chat template reads; none without a template.

        Args:
            has_tools: a conversation with tools may have a template of its own.

        Raises:
            UsageError: the template is broken.
        """
        import jinja2

        from specdec_cli.text.template import read_template

        try:
            return read_template(self._template(has_tools))
        except jinja2.TemplateSyntaxError as error:
            raise self._broken_template(error) from error

    @property
    def template_owner(self) -> str:
        """Where the chat template comes from: the option that replaces the model's own, or the model."""
        return "--chat-template" if self._is_template_given else self.name

    def _template(self, has_tools: bool) -> str:
        template = getattr(self.hf, "chat_template", None) or ""
        if not isinstance(template, Mapping):
            return str(template)
        preferred = ("tool_use", "default") if has_tools else ("default",)
        name = next((name for name in preferred if name in template), None)
        return "" if name is None else str(template[name])

    def _broken_template(self, error: Exception) -> UsageError:
        return UsageError(
            f"the chat template of `{self.template_owner}` is broken: {' '.join(str(error).split())}",
            "correct it" if self._is_template_given else "copy the model again, or choose another with --chat-template",
        )

    @property
    def name(self) -> str:
        """Where the tokenizer came from, for messages."""
        return str(getattr(self.hf, "name_or_path", "") or type(self.hf).__name__)

    def compare(self, other: Tokenizer) -> Overlap:
        """The overlap of the two tokenizers. A draft must have the target's (`Overlap.equal`)."""
        return overlap(
            (self.vocabulary, other.vocabulary),
            (self._special_tokens(), other._special_tokens()),
            (lambda text: self.encode(text, False), lambda text: other.encode(text, False)),
        )

    def special_token(self, role: str) -> int | None:
        """The id of the token that has a role (`eos_token`, ...); None without one."""
        return self.id_of(self._special_tokens().get(role, ""))

    def _special_tokens(self) -> dict[str, str]:
        special: Mapping[str, Any] = self.hf.special_tokens_map
        return {role: str(token) for role, token in special.items() if not isinstance(token, list)}

    def stream(
        self, stop: Sequence[str] = (), stop_ids: Collection[int] = (), skip_special_tokens: bool = True
    ) -> TextStream:
        """Tokens to text as they come, ending at a stop string or a stop token."""
        return TextStream(
            self.detokenizer(skip_special_tokens), stop, stop_ids, self._special_name, skip_special_tokens
        )

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one text."""
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._shown_bytes if skip_special_tokens else self._token_bytes)
        return WindowDetokenizer(self, skip_special_tokens)

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether a text is the concatenated bytes of its tokens; looked up, then tried on a few tokens."""
        if type(getattr(self._backend, "decoder", None)).__name__ != "ByteLevel":
            return False
        probe = list(range(0, self.num_tokens, max(1, self.num_tokens // 64)))
        detokenizer = ByteLevelDetokenizer(self._shown_bytes)
        return "".join(map(detokenizer.push, probe)) + detokenizer.flush() == self.decode(probe)

    def is_silent(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether a token is left out before decoding: special ones, and ids that no token has."""
        return (skip_special_tokens and token_id in self.special_ids) or self._token(token_id) is None

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        """Every token's bytes; only of a byte-level tokenizer, which has a backend."""
        return TokenBytes(self._backend.id_to_token)

    @cached_property
    def _shown_bytes(self) -> TokenBytes:
        """The same, with none for special tokens."""
        return TokenBytes(self._backend.id_to_token, self.special_ids)

    def text_of(self, token_id: int) -> str:
        """A token's text where it stands alone."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def _special_name(self, token_id: int) -> str:
        """A special token's text; empty of other tokens."""
        return self.text_of(token_id) if token_id in self.special_ids else ""

    def piece(self, token_id: int) -> str:
        """A token's text as it reads inside a text, its leading space included; a special one's is its name."""
        token = self._token(token_id) or ""
        if not self._is_byte_level and "\u2581" in token:
            return token.replace("\u2581", " ")
        return self.text_of(token_id)

    def piece_bytes(self, token_id: int) -> bytes:
        """A token's bytes as it stands inside a text; part of a character's where the token is no more."""
        if self._is_byte_level:
            return self._token_bytes[token_id]
        if self._token(token_id) is None:
            return b""
        byte = self.byte_tokens.get(token_id)
        return self.piece(token_id).encode() if byte is None else bytes([byte])

    def added_bytes(self, token_id: int, begins: bool) -> bytes:
        """Bytes that a token adds to a text: part of a character's where the token is no more.

        Args:
            token_id: any token; a special one, and an id that no token has, add nothing.
            begins: whether it begins the text, where many tokenizers leave out its space.
        """
        if self._is_byte_level:
            return self._shown_bytes[token_id]
        if self.is_silent(token_id, skip_special_tokens=True):
            return b""
        byte = self.byte_tokens.get(token_id)
        if byte is not None:
            return bytes([byte])
        key = token_id, begins
        added = self._added.get(key)
        if added is None:
            added = self._added[key] = self._added_text(token_id, begins).encode("utf-8", "replace")
        return added

    def _added_text(self, token_id: int, begins: bool) -> str:
        alone = self.text_of(token_id)
        if begins or self._letter is None:
            return alone
        letter = self.text_of(self._letter)
        both = self.decode([self._letter, token_id], skip_special_tokens=False)
        return both[len(letter) :] if both.startswith(letter) else alone

    @cached_property
    def _letter(self) -> int | None:
        """A token that is nothing but a letter, behind which others show what they add to a text."""
        ids = (i for i in range(self.num_tokens) if self._token(i) is not None and i not in self.special_ids)
        return next((i for i in ids if len(text := self.text_of(i)) == 1 and text.isalpha()), None)

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """Ids of byte-fallback tokens (`<0x41>`) with their byte; empty where `<0x41>` is not an A."""
        letter = self.id_of("<0x41>")
        if letter is None or self.text_of(letter) != "A":
            return {}
        ids = ((self.id_of(f"<0x{byte:02X}>"), byte) for byte in range(256))
        return {token_id: byte for token_id, byte in ids if token_id is not None}

    @cached_property
    def strips_first_space(self) -> bool:
        """Whether a byte-fallback space at the beginning of a text is dropped, as Llama's decoder does."""
        space = self.id_of("<0x20>")
        return space is not None and self.text_of(space) == ""

    def _token(self, token_id: int) -> str | None:
        """The token of an id; None where there is none."""
        if self._backend is None:
            return self._tokens_by_id.get(token_id)
        token: str | None = None if token_id < 0 else self._backend.id_to_token(token_id)
        return token

    def id_of(self, token: str) -> int | None:
        """The id of a token; None where there is none."""
        if self._backend is None:
            return self.vocabulary.get(token)
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    @cached_property
    def _tokens_by_id(self) -> dict[int, str]:
        return {token_id: token for token, token_id in self.vocabulary.items()}


def _template_hint(error: Exception, messages: Sequence[Mapping[str, Any]]) -> str:
    import jinja2

    if isinstance(error, jinja2.UndefinedError):
        return f"the template reads what these messages lack: {_CORRECT}"
    if not isinstance(error, jinja2.TemplateError | ValueError):  # which templates and transformers raise themselves
        return f"the template cannot take these messages: {_CORRECT}"
    if any(message.get("role") == "system" for message in messages):
        return "the template may know no system role: put its text into the first user message"
    return "most templates want user and assistant in turns, beginning with user"
