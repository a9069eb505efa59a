"""Tables of rotary positions as the compiled decoder reads them, from transformers' own rotary module."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.llama.structures import address


class Rotations:
    """One table [positions, R/2] complex64 for each type of layer that turns otherwise; they grow by doubling.

    Args:
        rotary: transformers' module.
        num_turned: R, how many numbers of a head are turned.
        threshold: the length up to which long rope takes its short frequencies; None without long rope.
    """

    def __init__(self, rotary: Any, num_turned: int, threshold: int | None) -> None:
        by_type = getattr(rotary, "rope_type", None)
        self.types: list[str | None] = sorted(by_type) if isinstance(by_type, dict) else [None]
        self._rotary = rotary
        self._half = num_turned // 2
        self._threshold = threshold
        self._tables: dict[bool, tuple[int, list[Tensor], Any]] = {}

    def of_layer(self, layer_type: str | None) -> int:
        """The number of the table for a type of layer."""
        return self.types.index(layer_type) if layer_type in self.types else 0

    def address(self, num_positions: int) -> int:
        """Where the addresses of the tables are, for texts of so many tokens."""
        is_long = self._threshold is not None and num_positions > self._threshold
        num, _, addresses = self._tables.get(is_long, (0, [], None))
        if num_positions > num:
            addresses = self._grow(num_positions, is_long)
        return ctypes.addressof(addresses)

    def _grow(self, num_positions: int, is_long: bool) -> Any:
        num = max(2 * num_positions, 512)
        if self._threshold is not None:  # the longest position says which frequencies are taken
            num = max(num, self._threshold + 1) if is_long else min(num, self._threshold)
        tables = [self._table(num, layer_type) for layer_type in self.types]
        addresses = (ctypes.c_void_p * len(tables))(*map(address, tables))
        self._tables[is_long] = num, tables, addresses
        return addresses

    def _table(self, num: int, layer_type: str | None) -> Tensor:
        which = () if layer_type is None else (layer_type,)
        cosines, sines = self._rotary(torch.empty(0), torch.arange(num)[None], *which)
        turns = torch.complex(cosines[0, :, : self._half], sines[0, :, : self._half])
        return turns.contiguous()  # the cosines of some versions of transformers are views by frequency
