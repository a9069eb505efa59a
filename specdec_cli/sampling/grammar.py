"""Structured output: which tokens a grammar allows next, along the output and along what is drafted after it.

llguidance (extra `structured`) says what the text may be; here is what that means for tokens that end an output. Its
tokenizer is given an end token of its own, beyond the vocabulary, which is allowed exactly where the text may end:
there a request's own end tokens are allowed, and nowhere else.

Letter: V vocabulary.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from threading import Lock
from time import thread_time
from typing import Any, Literal, Protocol, Self, get_args
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.errors import RunError, UsageError

BoolArray = npt.NDArray[np.bool_]

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
KINDS: tuple[str, ...] = get_args(Kind)

_END = "<|specdec: the text may end here|>"
_ADDED = '"added_tokens":'
_SECONDS_PER_MASK = 0.005
_SUPPORTED = "structured output needs a fast tokenizer whose tokens are bytes, as byte-level BPE and Llama's are"
# They bound what a mask costs. The worst grammar that we know, ambiguous at every byte, takes 0.4 s a mask with 10,000
# items and 150,000 tokens, and 6 s with llguidance's 50,000; schemas of 300 optional properties need 3,000. Of the
# states, 50,000 take 10 MB, and ordinary schemas need 5,000. Building a lexer is not bounded: see `grammar_sandbox`.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 10_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}


class GrammarError(RunError):
    """A grammar that was fine to begin with cannot go on: it became too costly, or no token continues it."""


class TokenizerLike(Protocol):
    """The tokenizer interface that grammars need; `text.Tokenizer` has it.

    Attributes:
        hf: the tokenizer object of transformers.
    """

    hf: Any

    @property
    def num_tokens(self) -> int:
        """V, the size of the real vocabulary."""
        ...

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a text as the tokenizer knows them."""
        ...


class MaskBudget:
    """Processor time that a grammar's masks may take, those of all outputs that follow it together.

    Args:
        seconds: beyond 5 ms for each mask; None for any.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._left = seconds

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self._left is not None and self._left < 0

    def spend(self, seconds: float, num_masks: int = 0) -> None:
        """Take off what was used, and add what masks bring."""
        if self._left is not None:
            self._left = self._left - seconds + num_masks * _SECONDS_PER_MASK


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar; any number of outputs may follow it, on any thread.

    Args:
        kind: one of KINDS.
        tokenizer: what it was compiled for.
        warnings: llguidance's, about parts that it does not enforce.
    """

    kind: str
    tokenizer: TokenizerLike
    warnings: tuple[str, ...]
    _prototype: Any = field(repr=False)
    _end: int = field(repr=False)
    _budget: MaskBudget = field(repr=False)

    def start(self, num_tokens: int, stop_ids: Collection[int], eos_ids: Collection[int] = ()) -> Matcher:
        """Follow a new output.

        Args:
            num_tokens: V, the width of the masks.
            stop_ids: tokens that end this output.
            eos_ids: the model's own end tokens; never text, even where the output does not end at them.
        """
        never = {*eos_ids, *self.tokenizer.eos_token_ids}
        return Matcher(
            self._prototype.deep_copy(), self._end, num_tokens, frozenset(stop_ids), frozenset(never), self._budget
        )


@dataclass(frozen=True, slots=True)
class Lookahead:
    """A grammar's judgement of drafted tokens, each on its own path.

    Args:
        fitting: the nodes that fit after all before them, in their order.
        masks: [V] bool, the tokens that may follow the context (CONTEXT_END) and each fitting node. A node is missing
            where nothing is ever emitted after it: it ends the output, or the grammar cannot continue there.
    """

    fitting: tuple[int, ...]
    masks: dict[int, BoolArray]


class Matcher:
    """One output's place in its grammar.

    Args:
        follower: llguidance's matcher.
        end: its end token.
        num_tokens: V.
        stop_ids: tokens that end the output.
        never: end tokens of the model; allowed as `stop_ids` alone.
        budget: that its masks are paid from.
    """

    def __init__(
        self,
        follower: Any,
        end: int,
        num_tokens: int,
        stop_ids: frozenset[int],
        never: frozenset[int],
        budget: MaskBudget,
    ) -> None:
        self._follower = follower
        self._budget = budget
        self._end = end
        self._words = np.zeros((end + 32) // 32, dtype=np.int32)
        self._num_tokens = num_tokens
        self._stop_ids = stop_ids
        self._stops, self._never = ([token for token in ids if token < num_tokens] for ids in (stop_ids, never))
        self.may_end = False
        """Whether the text matches the grammar as it is, be there more to come or not."""
        self._allowed, self.is_finished = self._mask(follower)

    @property
    def allowed(self) -> BoolArray:
        """[V] bool, the tokens that may come next.

        Raises:
            GrammarError: the grammar became too costly, or no token continues it.
        """
        if self._allowed is None:
            spent = "its masks take too much processor time" if self._budget.is_spent else ""
            words = spent or _words(self._follower.get_error())
            raise GrammarError(f"the grammar cannot continue: {words}", "simplify the grammar")
        return self._allowed

    def accept(self, tokens: Sequence[int]) -> int:
        """Follow emitted tokens up to and with the first after which nothing may be emitted.

        That is a stop token, one after which the grammar can only end (`is_finished`), or one after which it cannot go
        on (`allowed` raises).

        Returns:
            How many tokens stand.
        """
        for i, token in enumerate(tokens):
            if token in self._stop_ids:
                return i + 1
            began = thread_time()
            self._follower.consume_token(token)
            self._budget.spend(thread_time() - began)
            self._allowed, self.is_finished = self._mask(self._follower)
            if self.is_finished or self._allowed is None:
                return i + 1
        return len(tokens)

    def look(self, drafted: Drafted) -> Lookahead:
        """Masks along drafted tokens as far as they fit; the place in the grammar stays as it was.

        Raises:
            GrammarError: as `allowed`.
        """
        masks, fitting = {CONTEXT_END: self.allowed}, []
        # Copies, not roll-backs: a follower that runs into an error never comes out of it.
        ahead = {CONTEXT_END: self.copy()}
        last_child = dict(zip(drafted.parents, range(len(drafted)), strict=True))
        for node, (parent, token) in enumerate(zip(drafted.parents, drafted.tokens, strict=True)):
            if parent not in masks or not masks[parent][token]:
                continue
            fitting.append(node)
            if token in self._stop_ids:
                continue
            here = ahead[parent] if node == last_child[parent] else ahead[parent].copy()
            here.accept((token,))
            mask = here._open_mask()
            if mask is not None:
                masks[node], ahead[node] = mask, here
        return Lookahead(tuple(fitting), masks)

    def copy(self) -> Self:
        """Another output at the same place."""
        other = copy.copy(self)
        began = thread_time()
        other._follower = self._follower.deep_copy()
        self._budget.spend(thread_time() - began)
        return other

    def _open_mask(self) -> BoolArray | None:
        """As `allowed`, but None where nothing can follow."""
        try:
            mask = self.allowed
        except GrammarError:
            return None
        return None if self.is_finished else mask

    def _mask(self, follower: Any) -> tuple[BoolArray | None, bool]:
        """The tokens [V] that may come next, and whether none may because the text is complete.

        The mask is None where the grammar cannot continue and the text is not complete.
        """
        began = thread_time()
        follower.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._budget.spend(thread_time() - began, num_masks=1)
        if follower.is_error() or self._budget.is_spent:
            return None, False
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        mask = np.zeros(self._num_tokens, dtype=np.bool_)
        num = min(self._num_tokens, self._end)
        mask[:num] = bits[:num]
        mask[self._never] = False
        self.may_end = bool(bits[self._end])
        if not mask.any():
            return (mask, True) if self.may_end else (None, False)
        if self.may_end:
            mask[self._stops] = True
        return mask, False


def compile_grammar(kind: str, source: str, tokenizer: TokenizerLike, mask_seconds: float | None = None) -> Grammar:
    """Compile what an output must match, whatever that costs (`GrammarCompiler` limits it). Any thread may call it.

    Args:
        kind: json_object (any JSON object; no source), json_schema (a JSON Schema), regex (Rust's syntax, matched from
            end to end), choice (a JSON list of texts), grammar (Lark as llguidance reads it, or llama.cpp's GBNF).
        source: the text of it; its size is for the caller to bound. JSON is compact unless a schema's `x-guidance`
            asks for whitespace (`{"x-guidance": {"whitespace_flexible": true}}`).
        tokenizer: the target's.
        mask_seconds: processor time of all its masks beyond 5 ms for each; None for any.

    Raises:
        UsageError: a source that does not compile, matches nothing or only the empty text; an unknown kind; a
            tokenizer that llguidance cannot read; llguidance is not installed.
    """
    llguidance = _llguidance()
    reads, end = read_tokenizer(tokenizer)
    grammar = _definition(kind, source, llguidance.LLMatcher)
    limits = llguidance.LLParserLimits(**_LIMITS)
    prototype = llguidance.LLMatcher(reads, grammar, log_level=0, limits=limits)
    if prototype.is_error():
        raise _refused(kind, _words(prototype.get_error()))
    # Copies share the lexer's states, so the engine does not build again what this mask needed.
    never = frozenset(tokenizer.eos_token_ids)
    first = Matcher(prototype.deep_copy(), end, tokenizer.num_tokens, frozenset(), never, MaskBudget())
    if first.is_finished:
        raise _refused(kind, "only the empty text matches it")
    try:
        _ = first.allowed
    except GrammarError as error:
        raise _refused(kind, "no text matches it" if "NoExtension" in error.message else error.message) from error
    warnings = tuple(prototype.get_grammar_warnings())
    return Grammar(kind, tokenizer, warnings, prototype, end, MaskBudget(mask_seconds))


def check_installed() -> None:
    """Refuse structured output where llguidance is missing.

    Raises:
        UsageError: it is not installed.
    """
    _llguidance()


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UsageError(
            "structured output needs llguidance, which is not installed", "`pip install 'specdec-cli[structured]'`"
        ) from error
    return llguidance


def _definition(kind: str, source: str, matcher: Any) -> str:
    """The form of a grammar that llguidance accepts."""
    compact = {"whitespace_flexible": False}
    definition: str
    if kind == "json_object":
        definition = matcher.grammar_from_json_schema('{"type":"object"}', defaults=compact)
    elif kind == "json_schema":
        try:
            definition = matcher.grammar_from_json_schema(source, defaults=compact)
        except ValueError as error:
            if source.strip() in ("true", "false"):
                raise UsageError("`json_schema` must be an object", "write {} for any JSON") from error
            raise _refused(kind, _words(str(error))) from error
    elif kind == "regex":
        definition = matcher.grammar_from_regex(source)
    elif kind == "choice":
        # One terminal: as alternatives of a rule, 2,000 choices are too many and 100,000 take minutes.
        definition = matcher.grammar_from_lark(
            "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in _choices(source))
        )
    elif kind == "grammar":
        definition = matcher.grammar_from_lark(_lark(source))
    else:
        raise UsageError(f"there is no kind of grammar `{kind}`", f"one of {', '.join(KINDS)}")
    return definition


def _lark(source: str) -> str:
    """A grammar in Lark's form; llama.cpp's GBNF (`root ::= …`), which is xgrammar's EBNF, is translated."""
    if not re.search(r"(?m)^\s*[\w-]+\s*::=", source) or re.search(r"(?m)^\s*\??start\s*:(?!:)", source):
        return source
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(source)
    except RecursionError:
        raise
    except Exception as error:  # llguidance raises plain exceptions for what it cannot translate
        raise _refused("grammar", str(error)) from error
    return lark


def _choices(source: str) -> list[str]:
    try:
        choices = json.loads(source)
    except ValueError as error:
        raise _refused("choice", f"it is not JSON ({error})") from error
    if choices == []:
        raise UsageError("`choice` is an empty list", "give at least one text")
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise _refused("choice", "it must be a list of texts, none of them empty")
    return choices


def _refused(kind: str, words: str) -> UsageError:
    return UsageError(f"`{kind}` does not compile: {words}", "see llguidance's documentation for what is supported")


def _words(error: str) -> str:
    """llguidance's message without the source that it repeats."""
    lines = [line.strip() for line in error.splitlines() if line.strip() and line.strip() != "<non-verbose/>"]
    told = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "no reason given")
    return told.removeprefix("error: ")


_tokenizers: WeakKeyDictionary[TokenizerLike, tuple[Any, int]] = WeakKeyDictionary()
_lock = Lock()


def read_tokenizer(tokenizer: TokenizerLike) -> tuple[Any, int]:
    """llguidance's view of a tokenizer and the id of its end token; built once for each."""
    with _lock:
        if tokenizer not in _tokenizers:
            _tokenizers[tokenizer] = _read(tokenizer, *tokenizer_document(tokenizer))
        return _tokenizers[tokenizer]


def tokenizer_document(tokenizer: TokenizerLike) -> tuple[str, int]:
    """A tokenizer as text, for `know_tokenizer` in another process, and the id of its end token.

    Raises:
        UsageError: llguidance cannot read it.
    """
    backend = getattr(tokenizer.hf, "backend_tokenizer", None)
    if backend is None:
        raise UsageError(f"llguidance cannot read the tokenizer of `{tokenizer.name}`", _SUPPORTED)
    end = backend.get_vocab_size()
    if end < tokenizer.num_tokens:
        raise _unreadable(tokenizer, "its token ids have gaps")
    document: str = backend.to_str()
    # The end token is put into the text: a copy of a large vocabulary takes as long again as llguidance's reading.
    begin = document.index(_ADDED) + len(_ADDED)
    added, rest = json.JSONDecoder().raw_decode(document, begin)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added.append({"id": end, "content": _END, **flags, "special": True})
    return f"{document[:begin]}{json.dumps(added)}{document[rest:]}", end


def know_tokenizer(tokenizer: TokenizerLike, document: str, end: int) -> None:
    """Read a tokenizer from the text of `tokenizer_document`."""
    with _lock:
        _tokenizers[tokenizer] = _read(tokenizer, document, end)


def _read(tokenizer: TokenizerLike, document: str, end: int) -> tuple[Any, int]:
    try:
        return _llguidance().LLTokenizer(document, n_vocab=end + 1, eos_token=end), end
    except ValueError as error:
        raise _unreadable(tokenizer, str(error)) from error


def _unreadable(tokenizer: TokenizerLike, words: str) -> UsageError:
    return UsageError(f"llguidance cannot read the tokenizer of `{tokenizer.name}`: {words}", _SUPPORTED)
