"""The index of the drafting method `suffix`: texts, where their parts occurred, and what followed, in C++.

Python alone takes 10 to 60 µs for a guess among a million tokens, the library about 10.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.errors import RunError
from specdec_cli.lm.llama.library import BuildError, load_library
from specdec_cli.lm.llama.native import compiler
from specdec_cli.tree_shape import TreeShape

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-std=c++17", "-O2", "-x", "c++")


class _Wanted(ctypes.Structure):
    """`Wanted` of the C++ source."""

    _fields_ = [
        ("k", ctypes.c_int32),
        ("most_nodes", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("num_children", ctypes.c_int32),
        ("first_children", ctypes.POINTER(ctypes.c_int32)),
        ("min_probability", ctypes.c_double),
        ("min_expected", ctypes.c_double),
    ]


@dataclass(frozen=True, slots=True)
class GuessLimits:
    """Limits of a guess.

    Args:
        k: how deep it may be.
        most_nodes: tokens at most.
        shape: of its tree; None wants a chain.
        num_tokens: V; a token from there on ends a continuation.
        min_prob: a continuation ends before its probability falls below this.
        min_expected: nothing is guessed where the probabilities of the likeliest 8 tokens, one after another, add up to
            less than this.
    """

    k: int
    most_nodes: int
    shape: TreeShape | None
    num_tokens: int
    min_prob: float
    min_expected: float


class SuffixIndex:
    """Texts, one after another: which of their parts a text's end repeats, and how they went on.

    Raises:
        RunError: the library cannot be built.
    """

    def __init__(self) -> None:
        self._calls = _library()
        self._pointer = ctypes.c_void_p(self._calls.suffix_new())
        weakref.finalize(self, self._calls.suffix_free, self._pointer)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return int(self._calls.suffix_bytes(self._pointer))

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in more tokens at the end; a negative one parts two texts."""
        if tokens:
            numbers = array("i", tokens)
            self._calls.suffix_extend(self._pointer, numbers.buffer_info()[0], len(numbers))

    def drop(self, num: int) -> None:
        """Forget the first tokens of those that are left."""
        self._calls.suffix_drop(self._pointer, num)

    def propose(self, limits: GuessLimits, others: SuffixIndex | None = None) -> Drafted:
        """Continuations of this text's end, as it went on before here and in other texts; nothing where none is known.

        Args:
            limits: what the guess may be.
            others: further texts.
        """
        wanted, tokens, parents = _buffers(limits)
        pointer = None if others is None else others._pointer
        num = self._calls.suffix_propose(self._pointer, pointer, wanted, tokens, parents)
        if limits.shape is None:
            return Drafted.chain(tokens[:num])
        return Drafted(tuple(tokens[:num]), parents[:num])


@functools.lru_cache(maxsize=64)
def _buffers(
    limits: GuessLimits,
) -> tuple[ctypes.Array[_Wanted], ctypes.Array[ctypes.c_int32], ctypes.Array[ctypes.c_int32]]:
    """Limits for the library, and where it writes tokens and parents."""
    shape, first = limits.shape, None
    if shape is not None and not shape.is_dynamic:
        nodes = range(CONTEXT_END, shape.num_nodes(shape.depth))
        children = [shape.children(node) for node in nodes]
        first = (ctypes.c_int32 * (len(children) + 1))(*(its.start for its in children), children[-1].stop)
    num_children = 1 if shape is None else limits.most_nodes
    wanted = _Wanted(
        limits.k, limits.most_nodes, limits.num_tokens, num_children, first, limits.min_prob, limits.min_expected
    )
    numbers = ctypes.c_int32 * limits.most_nodes
    return (_Wanted * 1)(wanted), numbers(), numbers()


@functools.cache
def _library() -> ctypes.CDLL:
    """The compiled index.

    Raises:
        RunError: it cannot be built or loaded.
    """
    what = "the index of the draft `suffix`"
    command = [*compiler(), *_FLAGS]
    try:
        library = load_library(
            _SOURCE.read_text(encoding="utf-8"), command, may_lack_compiler=True, name="suffix-index", what=what
        )
    except BuildError as error:
        raise RunError(f"{what} cannot be compiled: {error.reason}", error.remedy) from error
    calls, pointer, number = library.calls, ctypes.c_void_p, ctypes.c_int64
    calls.suffix_new.argtypes, calls.suffix_new.restype = (), pointer
    calls.suffix_free.argtypes, calls.suffix_free.restype = (pointer,), None
    calls.suffix_bytes.argtypes, calls.suffix_bytes.restype = (pointer,), number
    calls.suffix_extend.argtypes, calls.suffix_extend.restype = (pointer, pointer, number), None
    calls.suffix_drop.argtypes, calls.suffix_drop.restype = (pointer, number), None
    calls.suffix_propose.argtypes, calls.suffix_propose.restype = (pointer,) * 5, number
    return calls
