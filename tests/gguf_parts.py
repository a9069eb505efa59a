"""A GGUF file in parts that a test changes one by one: magic, version, counts, entries, tensors and data."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGUFReader

SIZES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST, NUMBER, REAL, SHORT, SIGNED = 8, 9, 4, 6, 2, 5


def text(value: str | bytes) -> bytes:
    """A text as the file has it."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


@dataclass
class Tensor:
    """A tensor's line in the header; `sizes` in ggml's order."""

    name: str
    sizes: list[int]
    type: int
    offset: int


@dataclass
class Parts:
    """What a file is written of; `counts` stands for the numbers of tensors and entries where it is not None."""

    entries: dict[str, tuple[int, bytes]]
    tensors: list[Tensor]
    data: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    order: str = "<"
    counts: tuple[int, int] | None = None
    more_entries: list[tuple[str, int, bytes]] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> Parts:
        """The parts of a file that the gguf package wrote."""
        reader, entries = GGUFReader(path), {}
        for key, its in reader.fields.items():
            if not key.startswith("GGUF."):
                raw = b"".join(part.tobytes() for part in its.parts[3:])
                entries[key] = (int(its.types[0]), raw)
        tensors = [
            Tensor(t.name, [int(n) for n in t.shape], int(t.tensor_type), t.data_offset - reader.data_offset)
            for t in reader.tensors
        ]
        return cls(entries, tensors, path.read_bytes()[reader.data_offset :])

    def set(self, key: str, value: Any, kind: int | None = None) -> None:
        """Write another value of an entry, of its own type or another."""
        kind = self.entries[key][0] if kind is None else kind
        raw = text(value) if kind == TEXT else value if kind == LIST else struct.pack(f"<{SIZES[kind]}", value)
        self.entries[key] = (kind, raw)

    def tensor(self, name: str) -> Tensor:
        """A tensor by its name."""
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def header(self) -> bytes:
        """Everything before the data, which begins at a multiple of 32 bytes."""
        num_tensors, num_entries = self.counts or (len(self.tensors), len(self.entries) + len(self.more_entries))
        made = self.magic + struct.pack(f"{self.order}IQQ", self.version, num_tensors, num_entries)
        given = [(key, *value) for key, value in self.entries.items()]
        for key, kind, raw in given + self.more_entries:
            made += text(key) + struct.pack("<I", kind) + raw
        for its in self.tensors:
            made += text(its.name) + struct.pack(
                f"<I{len(its.sizes)}QIQ", len(its.sizes), *its.sizes, its.type, its.offset
            )
        return made

    def write(self, path: Path) -> Path:
        """The file."""
        header = self.header()
        path.write_bytes(header + b"\0" * (-len(header) % 32) + self.data)
        return path


def split(path: Path, folder: Path, count: int, *, leads_with_metadata: bool = False) -> list[Path]:
    """Write a file's model in several, as `llama-gguf-split` does; the first may hold metadata alone."""
    reader = GGUFReader(path)
    tensors = list(reader.tensors)
    groups: list[list[Any]] = [[]] if leads_with_metadata else []
    size = -(-len(tensors) // (count - len(groups)))
    groups += [tensors[begin : begin + size] for begin in range(0, len(tensors), size)]
    assert len(groups) == count, "as many parts as asked for"
    parts, entries = [], Parts.of(path).entries
    for number, group in enumerate(groups):
        data, own = b"", []
        for its in group:
            own.append(Tensor(its.name, [int(n) for n in its.shape], int(its.tensor_type), len(data)))
            data += its.data.tobytes() + b"\0" * (-its.n_bytes % 32)
        part = Parts(dict(entries) if number == 0 else {}, own, data)
        part.set("split.no", number, SHORT)
        part.set("split.count", count, SHORT)
        part.set("split.tensors.count", len(tensors), SIGNED)
        parts.append(part.write(folder / f"{path.stem}-{number + 1:05d}-of-{count:05d}.gguf"))
    return parts
