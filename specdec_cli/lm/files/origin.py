"""Where a language model's numbers come from: what a trace keeps, so that it is not taken for another model's.

The fingerprint is of the files alone: the same checkpoint has the same one on every machine, in every dtype and however
its layers are packed. It is cheap: names, sizes and headers of the files, and a little of every tensor, as
a fine-tuned model may share whole tensors with its base.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_SAMPLE_BYTES = 512
_NUM_SAMPLES = 1024
_BEGINNING_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Origin:
    """A model as it was loaded.

    Args:
        name: as given by the user; a folder differs from machine to machine.
        revision: of a hub id, as it was asked for.
        dtype: of its numbers, as in memory.
        quantize: of its linear layers, as recipes say.
        weights: the files' fingerprint; None where there are none.
    """

    name: str
    revision: str | None = None
    dtype: str | None = None
    quantize: str = "none"
    weights: str | None = None

    @property
    def words(self) -> str:
        """The name, with the revision where one was asked for."""
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    def has_weights_of(self, other: Origin) -> bool:
        """Whether both are one checkpoint; without files, whether the last parts of their names are alike."""
        if self.weights is None and other.weights is None:
            return Path(self.name).name == Path(other.name).name
        return self.weights == other.weights

    def computes_as(self, other: Origin) -> bool:
        """Whether the same numbers come out, but for the machine: one checkpoint, in one dtype, packed alike."""
        alike = (self.dtype, self.quantize) == (other.dtype, other.quantize)
        return alike and self.has_weights_of(other)


def fingerprint(config: bytes, folder: Path, files: Iterable[str]) -> str:
    """Fingerprint of a checkpoint: 16 hexadecimal digits of a model folder's configuration and weight files."""
    digest = hashlib.sha256(config)
    for name in sorted(files):
        path = folder / name
        digest.update(f"{name} {path.stat().st_size} ".encode())
        for sample in _samples(path):
            digest.update(sample)
    return digest.hexdigest()[:16]


def _samples(path: Path) -> Iterator[bytes]:
    """The header of a safetensors file and the middle of each of its tensors; of another file, pieces from all over."""
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            yield file.read(_BEGINNING_BYTES)
            for place in range(_NUM_SAMPLES):
                file.seek(path.stat().st_size * place // _NUM_SAMPLES)
                yield file.read(_SAMPLE_BYTES)
            return
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
        yield header
        for name, tensor in json.loads(header).items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                middle = max(begin, (begin + end - _SAMPLE_BYTES) // 2)
                file.seek(8 + length + middle)
                yield file.read(min(_SAMPLE_BYTES, end - middle))
