"""The header of a GGUF file (llama.cpp): metadata, and each tensor's name, shape and type.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec_cli.errors import RunError
from specdec_cli.lm.files.reading import first_line

SUFFIX = ".gguf"
ROPE_FACTORS = "rope_freqs.weight"
_MAGIC = b"GGUF"
_HINT = "copy or download the file again"
_LONG = 1000  # items; lists of layers or sections are shorter
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor by the header.

    Args:
        shape: in torch's order.
        kind: ggml's type, for example `Q4_K`.
    """

    shape: tuple[int, ...]
    kind: str

    @property
    def num_numbers(self) -> int:
        """Numbers that it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A file's header.

    Args:
        architecture: llama.cpp's name of the family.
        metadata: every entry but the tokenizer's lists.
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
    reader = header_reader()(path)
    metadata = {key: field.contents() for key, field in reader.fields.items() if field.data}
    tensors, end, factors = {}, 0, ()
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        tensors[tensor.name] = GgufTensor(shape, tensor.tensor_type.name)
        end = max(end, int(tensor.data_offset) + int(tensor.n_bytes))
        factors = tuple(tensor.data.tolist()) if tensor.name == ROPE_FACTORS else factors
    if end > size:
        raise ValueError(f"it ends after {size} of {end} bytes")
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    architecture = str(metadata["general.architecture"])
    num_tokens = 0 if tokens is None else len(tokens.data) or int(tokens.parts[-1][0])
    return GgufHeader(architecture, metadata, tensors, num_tokens, factors)


@lru_cache(maxsize=1)
def header_reader() -> Any:
    """The gguf package's reader, which passes over long lists: a vocabulary's would take it ten seconds.

    A list that was passed over has no `data`, and its last part is its length.
    """
    from gguf import GGUFReader, GGUFValueType

    class HeaderReader(GGUFReader):  # type: ignore[misc]  # the package is untyped here
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == GGUFValueType.ARRAY:
                kind, length = (self._get(orig_offs + skipped, type_) for skipped, type_ in ((0, "u4"), (4, "u8")))
                if length[0] > _LONG:
                    size = _list_bytes(self.data[orig_offs + 12 :], kind[0], int(length[0]), self.gguf_scalar_to_np)
                    return 12 + size, [kind, length], [], [GGUFValueType.ARRAY, GGUFValueType(kind[0])]
            return super()._get_field_parts(orig_offs, raw_type)

    return HeaderReader


def _list_bytes(data: Any, kind: int, length: int, scalars: Mapping[Any, Any]) -> int:
    """The size of a list of strings or numbers.

    Args:
        data: the file from the list's first item on, uint8.
        kind: ggml's type of the items.
        length: how many there are.
        scalars: numpy's types by ggml's.
    """
    if kind in scalars:
        return int(length * scalars[kind](0).nbytes)
    view, place = memoryview(data), 0
    for _ in range(length):
        place += 8 + int.from_bytes(view[place : place + 8], "little")
    if place > len(view):
        raise ValueError("a list goes beyond its end")
    return place
