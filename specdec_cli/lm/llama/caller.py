"""Calls of the compiled decoder: one step's fields, the room that it works in, and what its threads lost."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from specdec_cli.lm.kernels.kinds import Kind
from specdec_cli.lm.llama import native
from specdec_cli.lm.llama.structures import ModelFields, StepFields
from specdec_cli.lm.machine.threads import THREADS


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
        weights = {"int8": "Int8", "blocks": "Blocks"}.get(kind, "BFloat16" if is_half else "Float32")
        self.library = native.step(weights, is_half)
        self.model = ModelFields()
        self._waited = ctypes.c_double()
        self.step = StepFields(waited=ctypes.pointer(self._waited))
        self._scratch = Floats()

    def size(self, num_rows: int, num_wanted: int, most_keys: int, logits: int) -> None:
        """Put sizes into the step, without hidden states, and make room for them.

        Args:
            num_rows: tokens that are fed.
            num_wanted: of these, those with logits.
            most_keys: of a row.
            logits: the address where they go.
        """
        step = self.step
        step.num_rows, step.num_wanted, step.most_keys, step.num_taps = num_rows, num_wanted, most_keys, 0
        step.num_threads, step.logits = THREADS.size(torch.get_num_threads()), logits
        step.scratch = self._scratch.at_least(self.library.scratch_floats(ctypes.byref(self.model), ctypes.byref(step)))

    def run(self, call: Callable[..., None], *others: Any) -> None:
        """Call the library for the step that was prepared, and tell the thread count what was lost to waiting."""
        self._waited.value = 0.0
        begin = perf_counter()
        call(ctypes.byref(self.model), ctypes.byref(self.step), *others)
        THREADS.learn(self.step.num_threads, perf_counter() - begin, self._waited.value)


class Floats:
    """Room for numbers, float32, that grows; what is in it is lost then."""

    def __init__(self) -> None:
        self._room = torch.empty(0)
        self._size = self._address = 0

    def at_least(self, size: int) -> int:
        """The address of so many."""
        if size > self._size:
            self._room, self._size = torch.empty(size), size
            self._address = self._room.data_ptr()
        return self._address
