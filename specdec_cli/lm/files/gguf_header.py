"""The header of a GGUF file (llama.cpp): metadata, and each tensor's name, shape and type.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from specdec_cli.errors import RunError
from specdec_cli.lm.files.reading import first_line

SUFFIX = ".gguf"
ROPE_FACTORS = "rope_freqs.weight"
TOKENS = "tokenizer.ggml.tokens"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_TEXT, _LIST = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The letters that struct and numpy have for the types of entries."""
_LISTS = frozenset({TOKENS} | {f"tokenizer.ggml.{part}" for part in ("merges", "scores", "token_type")})
_HINT = "copy or download the file again"
_LONG = 1000  # items; lists of layers or sections are shorter, and a vocabulary's take a second to read
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor by the header.

    Args:
        shape: in torch's order.
        kind: ggml's type, for example `Q4_K`.
        offset: of its first byte, from the beginning of all tensors.
        num_bytes: that it takes in the file.
    """

    shape: tuple[int, ...]
    kind: str
    offset: int
    num_bytes: int

    @property
    def num_numbers(self) -> int:
        """Numbers that it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class PassedList:
    """Stands for a list that was passed over."""

    length: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A file's header.

    Args:
        architecture: llama.cpp's name of the family.
        metadata: every entry; `PassedList` in the place of long lists.
        tensors: by their names in the file.
        data_start: byte of the file where the tensors begin.
        num_tokens: of its tokenizer; 0 where it has none.
        rope_factors: by which the file divides rotary frequencies; empty where it does not.
    """

    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data_start: int
    num_tokens: int
    rope_factors: tuple[float, ...]

    @property
    def own(self) -> dict[str, Any]:
        """The entries of the architecture, without its name."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The types of its matrices, the one with most numbers first."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                counts[tensor.kind] = counts.get(tensor.kind, 0) + tensor.num_numbers
        return tuple(sorted(counts, key=lambda kind: -counts[kind]))

    @property
    def dtype(self) -> str:
        """The dtype that its numbers are in: that of its matrices where there is one, bfloat16 for blocks."""
        kinds = self.kinds
        return _FLOATS.get(kinds[0], "bfloat16") if len(kinds) == 1 else "bfloat16"


def read_gguf_header(name: str, path: Path) -> GgufHeader:
    """The header of a file, once it is whole.

    Raises:
        RunError: it is no GGUF file, truncated, a part of a split model, or the gguf package is not installed.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise RunError(f"`{name}` is not a GGUF file: it does not begin with `GGUF`", _HINT)
    if find_spec("gguf") is None:
        raise RunError(f"`{name}` takes the package `gguf`, which is not installed", "pip install 'specdec-cli[gguf]'")
    state = path.stat()
    try:
        header = _read(path, state.st_mtime_ns, state.st_size)
    except Exception as error:
        raise RunError(f"`{name}` is not a whole GGUF file: {first_line(error)}", _HINT) from error
    parts = int(header.metadata.get("split.count") or 1)
    if parts > 1:
        said = f"`{name}` is one of {parts} files of a model"
        raise RunError(said, "join them with llama.cpp's `llama-gguf-split --merge`, and give the whole file")
    return header


@lru_cache(maxsize=4)
def _read(path: Path, changed: int, size: int) -> GgufHeader:
    """Read a header; `changed` and `size` are the file's, which tell a replaced file from the one before."""
    with _reading(path) as cursor:
        metadata, tensors, data_start = _header(cursor, frozenset())
        end = max((data_start + tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=0)
        if end > size:
            raise ValueError(f"it ends after {size} of {end} bytes")
        factors: tuple[float, ...] = ()
        if ROPE_FACTORS in tensors:
            begin = data_start + tensors[ROPE_FACTORS].offset
            factors = tuple(np.frombuffer(cursor.data, "<f4", tensors[ROPE_FACTORS].num_numbers, begin).tolist())
    tokens = metadata.get(TOKENS)
    num_tokens = tokens.length if isinstance(tokens, PassedList) else len(tokens or ())
    return GgufHeader(str(metadata["general.architecture"]), metadata, tensors, data_start, num_tokens, factors)


def read_lists(path: Path) -> dict[str, Any]:
    """The metadata of a file, the tokenizer's long lists included; numbers as arrays."""
    with _reading(path) as cursor:
        return _header(cursor, _LISTS)[0]


@contextmanager
def _reading(path: Path) -> Iterator[_Cursor]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield _Cursor(data)


class _Cursor:
    """A place in a mapped file that moves on with what is read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.place = data, 0

    def take(self, form: str) -> Any:
        """One number, by struct's letter."""
        found = struct.unpack_from(f"<{form}", self.data, self.place)[0]
        self.place += struct.calcsize(f"<{form}")
        return found

    def text(self) -> str:
        length = self.take("Q")
        self.place += length
        if self.place > len(self.data):
            raise ValueError("a text goes beyond its end")
        return self.data[self.place - length : self.place].decode("utf-8", "replace")

    def texts(self, length: int) -> list[str]:
        """As many texts; the loop over a whole vocabulary, which is why it holds everything in locals."""
        data, place, found, size_at = self.data, self.place, [], struct.Struct("<Q").unpack_from
        for _ in range(length):
            begin = place + 8
            place = begin + size_at(data, place)[0]
            found.append(data[begin:place].decode("utf-8", "replace"))
        if place > len(data):
            raise ValueError("a list goes beyond its end")
        self.place = place
        return found

    def pass_texts(self, length: int) -> None:
        data, place, size_at = self.data, self.place, struct.Struct("<Q").unpack_from
        for _ in range(length):
            place += 8 + size_at(data, place)[0]
        if place > len(data):
            raise ValueError("a list goes beyond its end")
        self.place = place


def _header(cursor: _Cursor, wanted: Container[str]) -> tuple[dict[str, Any], dict[str, GgufTensor], int]:
    """Metadata, tensors, and where their numbers begin.

    Args:
        cursor: at the file's beginning.
        wanted: names of long lists that are read; others are passed over.
    """
    cursor.place = len(_MAGIC)
    version = cursor.take("I")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}, and {' and '.join(map(str, _VERSIONS))} are read")
    num_tensors, num_entries = cursor.take("Q"), cursor.take("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.text()
        metadata[key] = _value(cursor, cursor.take("I"), key in wanted)
    tensors = {}
    for _ in range(num_tensors):
        name = cursor.text()
        shape = tuple(cursor.take("Q") for _ in range(cursor.take("I")))[::-1]
        tensors[name] = _tensor(shape, cursor.take("I"), cursor.take("Q"))
    alignment = int(metadata.get("general.alignment") or _ALIGNMENT)
    return metadata, tensors, -(-cursor.place // alignment) * alignment


def _value(cursor: _Cursor, kind: int, is_wanted: bool) -> Any:
    """An entry's value."""
    if kind == _TEXT:
        return cursor.text()
    if kind != _LIST:
        return cursor.take(_NUMBERS[kind])
    kind, length = cursor.take("I"), cursor.take("Q")
    is_passed = length > _LONG and not is_wanted
    if kind in _NUMBERS:
        dtype = np.dtype(f"<{_NUMBERS[kind]}")
        begin, cursor.place = cursor.place, cursor.place + length * dtype.itemsize
        if cursor.place > len(cursor.data):
            raise ValueError("a list goes beyond its end")
        numbers = np.frombuffer(cursor.data, dtype, 0 if is_passed else length, begin)
        return PassedList(length) if is_passed else numbers.copy() if is_wanted else numbers.tolist()
    if kind != _TEXT:
        raise ValueError("it holds a list of lists")
    if is_passed:
        cursor.pass_texts(length)
        return PassedList(length)
    return cursor.texts(length)


def _tensor(shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    """A tensor by the header's numbers."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        name = GGMLQuantizationType(kind)
    except ValueError as error:
        raise ValueError(f"it holds a tensor of type {kind}, which is not known") from error
    per_block, block_bytes = GGML_QUANT_SIZES[name]
    return GgufTensor(shape, name.name, offset, math.prod(shape) // per_block * block_bytes)
