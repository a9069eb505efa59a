"""Rows of a weight in plain numbers, which become blocks of a few bits when the compiled decoder takes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from specdec_cli.lm.kernels.block_sizes import BLOCK, CODE_BYTES, INT8, block_bytes, row_bytes
from specdec_cli.lm.llama import native
from specdec_cli.lm.llama.file_rows import FileRows

_AT_ONCE = 256  # outputs that are float32 together: whole panels
_ROUNDED, _LEAST = 2.0**-10, 2.0**-18  # by rounding scales and minimums to 16 bits, relative and of tiny numbers


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows(FileRows):
    """A weight of plain numbers, which becomes blocks when it is packed; `data` has their shape and no memory.

    Args:
        weight: [rows, in], floating, as it was read.
    """

    weight: Tensor

    @classmethod
    def of(cls, name: str, model: str, weight: Tensor, type_: int) -> Self:
        """All rows of a weight.

        Args:
            name: in the model.
            model: whose weight it is, for messages.
            weight: [rows, in], floating.
            type_: INT4 or INT8.
        """
        data = np.broadcast_to(np.uint8(0), (len(weight), row_bytes(type_, weight.shape[1])))
        return cls(name, model, type_, weight.shape[1], data, torch.arange(len(weight)), weight.detach())

    @staticmethod
    def in_whole_panels(parts: list[FileRows]) -> list[FileRows]:
        """Parts of one matrix as one weight where they would begin inside of a panel; others as they are."""
        lanes = int(native.layouts().block_outputs())
        plain = [part.weight[part.order] for part in parts if isinstance(part, QuantizedRows)]
        if len(plain) < len(parts) or not any(len(part) % lanes for part in parts[:-1]):
            return parts
        return [QuantizedRows.of(parts[0].name, parts[0].model, torch.cat(plain), parts[0].type)]

    @property
    def scale_inputs(self) -> int:
        """How many of a product's inputs have one scale."""
        return BLOCK

    def fill(self, panels: Tensor) -> None:
        """Write the outputs into panels, as `FileRows` does."""
        library = native.layouts()
        bytes_at_once = _AT_ONCE // library.block_outputs() * library.block_panel_bytes(self.type, self.num_inputs)
        for i, begin in enumerate(range(0, len(self), _AT_ONCE)):
            blocks = replace(self, order=self.order[begin : begin + _AT_ONCE])._blocks()
            FileRows.fill(replace(self, data=blocks, order=torch.arange(len(blocks))), panels[i * bytes_at_once :])

    def reference(self) -> Tensor:
        """The numbers [out, in] float32 that the blocks mean, read without the decoder."""
        blocks = self._blocks().reshape(len(self), -1, block_bytes(self.type))
        scales, codes = _halves(blocks, 0), blocks[..., -CODE_BYTES[self.type] :]
        if self.type == INT8:
            numbers = codes.view(np.int8) * scales
        else:
            numbers = np.concatenate((codes & 15, codes >> 4), -1) * scales + _halves(blocks, 2)
        return torch.from_numpy(numbers.reshape(len(self), -1)[:, : self.num_inputs].copy())

    def are(self, numbers: Tensor) -> bool:
        """Whether numbers [out, in] float32 are what the blocks mean, and no further from the weight than rounding.

        A number is half a step of its block away at most, or what rounding scale and minimum to 16 bits adds.
        """
        weight = self.weight[self.order].float()
        parts = torch.nn.functional.pad(weight, (0, -weight.shape[1] % BLOCK)).view(len(weight), -1, BLOCK)
        least, most = parts.aminmax(dim=-1, keepdim=True)
        largest = parts.abs().amax(-1, keepdim=True)
        step = largest / 127 if self.type == INT8 else (most - least) / 15
        room = (step / 2 + largest * _ROUNDED + _LEAST).expand_as(parts).reshape(len(weight), -1)
        is_near = (numbers - weight).abs() <= room[:, : self.num_inputs]
        return bool(is_near.all()) and FileRows.are(self, numbers)

    def _blocks(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The outputs' blocks [out, bytes of a row] uint8, as GGUF files hold them."""
        weight = self.weight[self.order].float().contiguous()
        blocks = np.empty((len(weight), self.data.shape[1]), np.uint8)
        native.layouts().quantize_rows(self.type, weight.data_ptr(), len(weight), self.num_inputs, blocks.ctypes.data)
        return blocks


def _halves(blocks: np.ndarray[Any, np.dtype[np.uint8]], place: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Numbers of 16 bits in each block [out, blocks, 1] float32."""
    return np.ascontiguousarray(blocks[..., place : place + 2]).view("<f2").astype(np.float32)
