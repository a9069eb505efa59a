"""Calls of the compiled decoder: the fields of one step, the rotations and the room that it works with, its threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.cache.layout import Layout
from specdec_cli.lm.door import Draw
from specdec_cli.lm.kernels.kinds import Kind
from specdec_cli.lm.llama import native
from specdec_cli.lm.llama.model_fields import ModelFields
from specdec_cli.lm.machine.threads import THREADS


class StepFields(ctypes.Structure):
    """`Step`."""

    _fields_ = (
        ("rows", ctypes.POINTER(ctypes.c_int64)),
        ("wanted", ctypes.POINTER(ctypes.c_int64)),
        ("num_rows", ctypes.c_int64),
        ("num_wanted", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("most_keys", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("cache", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("waited", ctypes.POINTER(ctypes.c_double)),
        ("taps", ctypes.c_void_p),
        ("num_taps", ctypes.c_int64),
        ("states", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("inputs", ctypes.c_void_p),
        ("ends", ctypes.POINTER(ctypes.c_int64)),
        ("only_files", ctypes.c_int64),
    )


class ChanceFields(ctypes.Structure):
    """`Chance`."""

    _fields_ = (
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("top_k", ctypes.c_int64),
    )


class Caller:
    """Calls the library for one model. Not for two threads at once.

    Args:
        kind: of the weights of linear layers.
        dtype: of the model.

    Attributes:
        library: the compiled decoder.
        step: fields of the next call.
        model: fields of the model; set before the first call.
    """

    def __init__(self, kind: Kind, dtype: torch.dtype) -> None:
        is_half = dtype == torch.bfloat16
        weights = {"int8": "Int8", "int4": "Blocks", "blocks": "Blocks"}.get(kind, "BFloat16" if is_half else "Float32")
        self.library = native.step(weights, is_half)
        self.model = ModelFields()
        self._waited = ctypes.c_double()
        self.step = StepFields(waited=ctypes.pointer(self._waited))
        self._scratch = Floats()

    def reserve(self, num_rows: int, num_wanted: int, most_keys: int, logits: int) -> None:
        """Set the sizes of the next call, which wants no hidden states, and make room for its intermediate numbers.

        Args:
            num_rows: tokens that are fed.
            num_wanted: of these, those with logits.
            most_keys: keys that a row reads at most.
            logits: the address where they go.
        """
        step = self.step
        step.num_rows, step.num_wanted, step.most_keys, step.num_taps = num_rows, num_wanted, most_keys, 0
        step.num_threads, step.logits = THREADS.size(torch.get_num_threads()), logits
        step.scratch = self._scratch.at_least(self.library.scratch_floats(ctypes.byref(self.model), ctypes.byref(step)))

    def run(self, call: Callable[..., None], *others: Any) -> None:
        """Make the call that was prepared, and tell the thread count what its threads lost to waiting."""
        self._waited.value = 0.0
        begin = perf_counter()
        call(ctypes.byref(self.model), ctypes.byref(self.step), *others)
        THREADS.learn(self.step.num_threads, perf_counter() - begin, self._waited.value)


class Floats:
    """A float32 buffer that grows; its contents are lost when it does."""

    def __init__(self) -> None:
        self._room = torch.empty(0)
        self._size = self._address = 0

    def at_least(self, size: int) -> int:
        """The address of a buffer for at least `size` numbers."""
        if size > self._size:
            self._room, self._size = torch.empty(size), size
            self._address = self._room.data_ptr()
        return self._address


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
        addresses = (ctypes.c_void_p * len(tables))(*(table.data_ptr() for table in tables))
        self._tables[is_long] = num, tables, addresses
        return addresses

    def _table(self, num: int, layer_type: str | None) -> Tensor:
        which = () if layer_type is None else (layer_type,)
        cosines, sines = self._rotary(torch.empty(0), torch.arange(num)[None], *which)
        turns = torch.complex(cosines[0, :, : self._half], sines[0, :, : self._half])
        return turns.contiguous()  # the cosines of some versions of transformers are views by frequency


def token_rows(layout: Layout) -> Any:
    """The C++ source's `Row` of each token of a layout, as one array."""
    tokens, slots = layout.tokens, [-1] * len(layout.tokens)  # a token without a slot is not written
    for start, stop, slot in layout.pieces:
        slots[start:stop] = range(slot, slot + stop - start)
    fields: list[int] = []
    for span in layout.spans:
        slots_address = 0 if span.slots is None else span.slots.data_ptr()
        for place in range(span.start, span.stop):
            position = span.position + place - span.start
            fields += (tokens[place], position, slots[place], span.first_slot, slots_address, span.num_in_order)
    return (ctypes.c_int64 * len(fields))(*fields)


def chances(draws: Sequence[Draw | None]) -> Any:
    """The C++ source's `Chance` of each draw, as one array; temperature 0 takes the likeliest tokens."""
    fields = (ChanceFields * len(draws))()
    for chance, draw in zip(fields, draws, strict=True):
        chance.top_p = 1.0
        if draw is not None:
            chance.temperature = max(draw.temperature, torch.finfo(torch.float32).tiny)
            chance.top_p, chance.min_p, chance.top_k = draw.top_p, draw.min_p, draw.top_k or 0
    return fields
