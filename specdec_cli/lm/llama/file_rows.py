"""Rows of a weight, in blocks or in plain numbers, as they lie in a GGUF file that is mapped into memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from specdec_cli.errors import NotFiniteError
from specdec_cli.lm.llama import native

_PIECE = 1 << 24  # bytes of the file that are read before their memory is released
BLOCKS_HINT = "please report it; `--compute dequantized --quantize none` decodes it in plain numbers"
"""The way out for a model that does not decode rightly in blocks."""


@dataclass(frozen=True, slots=True)
class MappedBytes:
    """A tensor's bytes in a file that is mapped into memory.

    Args:
        mapping: of the file.
        begin: the first one.
        num_bytes: how many.
    """

    mapping: mmap.mmap
    begin: int
    num_bytes: int

    def array(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The bytes, which are read when they are used."""
        return np.frombuffer(self.mapping, np.uint8, self.num_bytes, self.begin)

    def release(self, begin: int, end: int) -> None:
        """Let go of the memory that bytes begin…end-1 take; they are read again when they are used again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = (self.begin + begin) // mmap.PAGESIZE * mmap.PAGESIZE
            self.mapping.madvise(mmap.MADV_DONTNEED, first, self.begin + end - first)


@dataclass(frozen=True, slots=True, eq=False)
class FileRows:
    """A weight [out, in] as a file holds it; nothing of it is read before it is packed.

    Args:
        name: in the file.
        model: whose file it is, for messages.
        type: ggml's number of its type.
        num_inputs: in.
        data: the tensor's bytes [rows, bytes of a row] uint8, mapped from the file.
        order: [out] int64, the file's row of each output.
        mapped: the tensor in its file, if `data` is mapped.
        packed: called with the bytes of outputs that were copied into panels.
    """

    name: str
    model: str
    type: int
    num_inputs: int
    data: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
    order: Tensor
    mapped: MappedBytes | None = field(default=None, kw_only=True)
    packed: Callable[[int], None] = field(default=lambda _: None, kw_only=True)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def num_bytes(self) -> int:
        """Memory for the outputs, as the file and the decoder hold them."""
        return len(self.order) * self.data.shape[1]

    @property
    def scale_inputs(self) -> int:
        """How many of a product's inputs have one scale; 1 where plain numbers meet them as they are."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        return int(GGML_QUANT_SIZES[GGMLQuantizationType(self.type)][0])

    def __getitem__(self, place: slice | Tensor) -> Self:
        """Some of the outputs, in another order."""
        return replace(self, order=self.order[place])

    def fill(self, panels: Tensor) -> None:
        """Write the outputs into panels, [as many bytes or more] uint8.

        Raises:
            NotFiniteError: a scale or a plain number is not finite.
        """
        library, data, to = native.layouts(), self.data.ctypes.data, panels.data_ptr()
        panel_bytes = library.block_panel_bytes(self.type, self.num_inputs)
        for part in self._pieces():
            order = part.order.contiguous()
            if library.fill_panels(self.type, data, order.data_ptr(), len(order), self.num_inputs, to):
                raise NotFiniteError(self.name, self.model)
            to += -(-len(order) // library.block_outputs()) * panel_bytes
            part.release()
            self.packed(part.num_bytes)

    def check(self) -> None:
        """Refuse rows that stay in the file as `fill` refuses those that it copies.

        Raises:
            NotFiniteError: a scale or a plain number is not finite.
        """
        rows = self.data.ctypes.data
        for part in self._pieces():
            if native.layouts().broken_blocks(self.type, rows, len(part), self.num_inputs):
                raise NotFiniteError(self.name, self.model)
            rows += part.num_bytes
            part.release()
            self.packed(part.num_bytes)

    def _pieces(self) -> Iterator[Self]:
        """The outputs in parts of whole panels."""
        lanes = int(native.layouts().block_outputs())
        at_once = -(-_PIECE // (lanes * self.data.shape[1])) * lanes
        return (self[begin : begin + at_once] for begin in range(0, len(self), at_once))

    def release(self) -> None:
        """Let go of the memory that was taken by reading the file."""
        if self.mapped is not None and len(self.order):
            row, (first, last) = self.data.shape[1], self.order.aminmax()
            self.mapped.release(int(first) * row, (int(last) + 1) * row)

    def reference(self) -> Tensor:
        """The numbers [out, in] float32 as the gguf package reads them, which shares nothing with our decoder."""
        from gguf import GGMLQuantizationType, quants

        rows = np.ascontiguousarray(self.data[self.order.numpy()])
        return torch.from_numpy(np.ascontiguousarray(quants.dequantize(rows, GGMLQuantizationType(self.type))))

    def are(self, numbers: Tensor) -> bool:
        """Whether numbers [out, in] float32 are, bit for bit, those of the outputs."""
        return torch.equal(numbers, self.reference())


def has_layout(type_: int) -> bool:
    """Whether the compiled decoder multiplies with blocks of a type."""
    return int(native.layouts().block_panel_bytes(ctypes.c_int64(type_), ctypes.c_int64(256))) > 0
