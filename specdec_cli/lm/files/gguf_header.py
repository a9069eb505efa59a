"""The header of a GGUF file (llama.cpp): metadata, and each tensor's name, shape and type.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from specdec_cli.errors import RunError
from specdec_cli.lm.files.names import GGUF_MAGIC
from specdec_cli.lm.files.reading import first_line
from specdec_cli.quantities import counted

SUFFIX = ".gguf"
ROPE_FACTORS = "rope_freqs.weight"
TOKENS = "tokenizer.ggml.tokens"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_TEXT, _LIST = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The letters that struct and numpy have for the types of entries."""
_LISTS = frozenset({TOKENS} | {f"tokenizer.ggml.{part}" for part in ("merges", "scores", "token_type")})
_HINT = "copy or download the file again"
_VERSION_HINT = "choose another file of the model, or convert it again with llama.cpp's `convert_hf_to_gguf.py`"
_LONG = 1000  # items; lists of layers or sections are shorter, and a vocabulary's take a second to read
# More than any file has, so that what a broken one says costs neither minutes nor memory.
_MOST_TEXTS, _MOST_TEXT_BYTES, _MOST_SIZES, _MOST_ALIGNMENT = 1 << 22, 1 << 24, 4, 1 << 20
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor by the header.

    Args:
        shape: in torch's order.
        kind: ggml's type, for example `Q4_K`.
        path: of its file.
        begin: its first byte in the file.
        num_bytes: that it takes there.
    """

    shape: tuple[int, ...]
    kind: str
    path: Path
    begin: int
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
        architecture: llama.cpp's name of the family; empty where the file has none, as later parts of a model.
        metadata: every entry; `PassedList` in the place of long lists.
        tensors: by their names in the file.
        num_tokens: of its tokenizer; 0 where it has none.
        rope_factors: by which the file divides rotary frequencies; empty where it does not.
    """

    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    num_tokens: int
    rope_factors: tuple[float, ...]

    @property
    def own(self) -> dict[str, Any]:
        """The entries of the architecture, without its name."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}

    @property
    def paths(self) -> set[Path]:
        """The files that its tensors lie in."""
        return {tensor.path for tensor in self.tensors.values()}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The types of its matrices, the one with most numbers first."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                counts[tensor.kind] = counts.get(tensor.kind, 0) + tensor.num_numbers
        return tuple(sorted(counts, key=lambda kind: -counts[kind]))

    @property
    def draft(self) -> str | None:
        """The kind of draft that the file holds for another file's target: `mtp`, or as `draft_formats` has it."""
        if self.architecture == "dflash":
            kinds = {"markov_w1.weight": "dspark", "selector_hidden.weight": "dflash2"}
            return next((kind for name, kind in kinds.items() if name in self.tensors), "dflash")
        is_alone = self.has_mtp and not any(name.startswith("blk.0.") for name in self.tensors)
        if is_alone or self.architecture.endswith("assistant"):
            return "mtp"
        return "eagle3" if self.architecture == "eagle3" else None

    @property
    def has_mtp(self) -> bool:
        """Whether it has MTP modules, with or without their model."""
        return any(".nextn." in name for name in self.tensors)

    @property
    def dtype(self) -> str:
        """The dtype that its numbers are in: that of its matrices where there is one, bfloat16 for blocks."""
        kinds = self.kinds
        return FLOATS.get(kinds[0], "bfloat16") if len(kinds) == 1 else "bfloat16"


def read_gguf_header(name: str, path: Path) -> GgufHeader:
    """The header of a file, once it is whole.

    Raises:
        RunError: it is no GGUF file, truncated, or the gguf package is not installed.
    """
    with path.open("rb") as file:
        magic = file.read(len(GGUF_MAGIC))
    if not magic:
        raise RunError(f"`{name}` is not a GGUF file: it is empty", _HINT)
    if magic != GGUF_MAGIC:
        raise RunError(f"`{name}` is not a GGUF file: it does not begin with `GGUF`", _HINT)
    if find_spec("gguf") is None:
        raise RunError(f"`{name}` takes the package `gguf`, which is not installed", "pip install 'specdec-cli[gguf]'")
    state = path.stat()
    try:
        return _read(path, state.st_mtime_ns, state.st_size)
    except _TruncatedError as error:
        raise RunError(f"`{name}` is not a whole GGUF file: {error}", _HINT) from error
    except Exception as error:
        hint = _VERSION_HINT if isinstance(error, _VersionError) else _HINT
        raise RunError(f"`{name}` cannot be read as a GGUF file: {first_line(error)}", hint) from error


@lru_cache(maxsize=256)  # parts of a few models
def _read(path: Path, changed: int, size: int) -> GgufHeader:
    """Read a header; `changed` and `size` are the file's, which tell a replaced file from the one before."""
    with _reading(path) as cursor:
        metadata, tensors = _header(cursor, path, frozenset())
        _check_places(tensors, size)
        factors: tuple[float, ...] = ()
        if ROPE_FACTORS in tensors:
            its = tensors[ROPE_FACTORS]
            if its.kind != "F32":
                raise ValueError(f"`{ROPE_FACTORS}` is in `{its.kind}`, and F32 is read")
            factors = tuple(np.frombuffer(cursor.data, "<f4", its.num_numbers, its.begin).tolist())
    architecture, tokens = metadata.get("general.architecture", ""), metadata.get(TOKENS, [])
    if not isinstance(architecture, str) or not architecture.isprintable():
        raise ValueError("it names no `general.architecture`")
    if not isinstance(tokens, PassedList | list):
        raise ValueError(f"its `{TOKENS}` is not a list")
    num_tokens = tokens.length if isinstance(tokens, PassedList) else len(tokens)
    return GgufHeader(architecture, metadata, tensors, num_tokens, factors)


def _check_places(tensors: Mapping[str, GgufTensor], num_bytes: int) -> None:
    """Refuse tensors that lie over each other or beyond the end of a file of so many bytes."""
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin < end:
            raise ValueError(f"its tensors `{before}` and `{name}` lie over each other")
        end, before = tensor.begin + tensor.num_bytes, name
        if end > num_bytes:
            raise _TruncatedError(f"it ends {counted(end - num_bytes, 'byte')} before `{name}` does")


def read_lists(path: Path) -> dict[str, Any]:
    """The metadata of a file, the tokenizer's long lists included; numbers as arrays."""
    with _reading(path) as cursor:
        return _header(cursor, path, _LISTS)[0]


@contextmanager
def _reading(path: Path) -> Iterator[_Cursor]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        try:
            yield cursor
        except (struct.error, OverflowError):  # a list of texts, which does not look where each of them ends
            cursor.skip(len(data) + 1)


class _TruncatedError(ValueError):
    """A file ends before what it says it holds."""


class _VersionError(ValueError):
    """A file is of a version or byte order that is not read."""


class _Cursor:
    """A place in a mapped file that moves on with what is read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.place = data, 0

    def take(self, form: str) -> Any:
        """One number, by struct's letter."""
        begin = self.skip(struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{form}", self.data, begin)[0]

    def skip(self, num_bytes: int) -> int:
        """Move on by so many bytes; returns where they begin."""
        begin, end = self.place, self.place + num_bytes
        if end > len(self.data):
            raise _TruncatedError(f"its header does not end within its {counted(len(self.data), 'byte')}")
        self.place = end
        return begin

    def text(self) -> str:
        length = self.take("Q")
        begin = self.skip(length)
        if length > _MOST_TEXT_BYTES:
            raise ValueError(f"its header holds a text of {length} bytes")
        return self.data[begin : begin + length].decode("utf-8", "replace")

    def name(self) -> str:
        """A text that messages name."""
        name = self.text()
        if not name.isprintable():
            raise ValueError(f"its header holds the name {name!r}")
        return name

    def texts(self, length: int) -> list[str]:
        """As many texts; the loop over a whole vocabulary, which is why it holds everything in locals."""
        data, place, texts, size_at = self.data, self.place, [], struct.Struct("<Q").unpack_from
        for _ in range(length):
            begin = place + 8
            place = begin + size_at(data, place)[0]
            if place - begin > _MOST_TEXT_BYTES:
                raise ValueError(f"its header holds a text of {place - begin} bytes")
            texts.append(data[begin:place].decode("utf-8", "replace"))
        self.skip(place - self.place)
        return texts

    def pass_texts(self, length: int) -> None:
        data, place, size_at = self.data, self.place, struct.Struct("<Q").unpack_from
        for _ in range(length):
            place += 8 + size_at(data, place)[0]
        self.skip(place - self.place)


def _header(cursor: _Cursor, path: Path, wanted: Container[str]) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata and tensors.

    Args:
        cursor: at the file's beginning.
        path: of the file.
        wanted: names of long lists that are read; others are passed over.
    """
    cursor.place = len(GGUF_MAGIC)
    version = cursor.take("I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        its = "it is big-endian" if swapped in _VERSIONS else f"its version is {version}"
        raise _VersionError(f"{its}, and little-endian files of versions {' and '.join(map(str, _VERSIONS))} are read")
    num_tensors, num_entries = cursor.take("Q"), cursor.take("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.name()
        if key in metadata:
            raise ValueError(f"it has the entry `{key}` twice")
        metadata[key] = _value(cursor, key, cursor.take("I"), key in wanted)
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name, num_sizes = cursor.name(), cursor.take("I")
        if name in tensors:
            raise ValueError(f"it has the tensor `{name}` twice")
        if not 1 <= num_sizes <= _MOST_SIZES:
            raise ValueError(f"its tensor `{name}` has {num_sizes} dimensions")
        shape = tuple(cursor.take("Q") for _ in range(num_sizes))[::-1]
        tensors[name] = _tensor(name, shape, cursor.take("I"), path, cursor.take("Q"))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= _MOST_ALIGNMENT:
        raise ValueError(f"its `general.alignment` is {alignment!r}")
    data_start = -(-cursor.place // alignment) * alignment
    return metadata, {name: replace(tensor, begin=data_start + tensor.begin) for name, tensor in tensors.items()}


def _value(cursor: _Cursor, key: str, kind: int, is_wanted: bool) -> Any:
    """An entry's value."""
    if kind == _TEXT:
        return cursor.text()
    if kind in _NUMBERS:
        return cursor.take(_NUMBERS[kind])
    if kind != _LIST:
        raise ValueError(f"its entry `{key}` is of type {kind}, which is not known")
    kind, length = cursor.take("I"), cursor.take("Q")
    is_passed = length > _LONG and not is_wanted
    if kind in _NUMBERS:
        dtype = np.dtype(f"<{_NUMBERS[kind]}")
        begin = cursor.skip(length * dtype.itemsize)
        numbers = np.frombuffer(cursor.data, dtype, 0 if is_passed else length, begin)
        return PassedList(length) if is_passed else numbers.copy() if is_wanted else numbers.tolist()
    if kind != _TEXT:
        raise ValueError(f"its entry `{key}` is a list of type {kind}, which is not read")
    if length > _MOST_TEXTS:
        raise ValueError(f"its entry `{key}` is a list of {length} texts")
    if is_passed:
        cursor.pass_texts(length)
        return PassedList(length)
    return cursor.texts(length)


def _tensor(name: str, shape: tuple[int, ...], kind: int, path: Path, offset: int) -> GgufTensor:
    """A tensor by the header's numbers; its offset counts from where the tensors of the file begin."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        its_type = GGMLQuantizationType(kind)
    except ValueError as error:
        raise ValueError(f"its tensor `{name}` is of type {kind}, which is not known") from error
    per_block, block_bytes = GGML_QUANT_SIZES[its_type]
    if shape[-1] % per_block:
        raise ValueError(
            f"its tensor `{name}` has rows of {shape[-1]} numbers, and `{its_type.name}` blocks of {per_block}"
        )
    return GgufTensor(shape, its_type.name, path, offset, math.prod(shape) // per_block * block_bytes)
