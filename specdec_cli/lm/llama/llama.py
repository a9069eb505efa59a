"""A decoder of our own for the Llama shape: RMS norm, rotary positions, grouped heads, a gated MLP.

A whole forward is one call of compiled code (`llama_step.cpp`): a small model's step would be spent in dispatch and a
large one's in products that read slower than memory gives. A row's numbers are computed in one order, whatever rows are
beside it, so that it has the same bits in any company, in every dtype. The weights are transformers' own, rearranged
(`llama_weights`). transformers' forward is the oracle; what is not known by name goes through it, and everything does
where there is no C++ compiler (`native`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.cache.contexts import Moves
from specdec_cli.lm.cache.layout import Layout
from specdec_cli.lm.cache.memory import Arena, zeros
from specdec_cli.lm.door import Continuations, Draw, Tap
from specdec_cli.lm.kernels.kinds import Kind
from specdec_cli.lm.llama import native
from specdec_cli.lm.llama.llama_weights import Layer, Matrix, Shape, empty, half_of, norm_weight, panels, take_layer
from specdec_cli.lm.machine.threads import CREW

_FLOAT32, _BFLOAT16, _INT8 = range(3)
_SLOTS_GRAIN = 16  # whose keys the compiled half reads together: its WIDTH


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_int64),
        ("in", ctypes.c_int64),
        ("half", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("qkv", _Matrix),
        ("head_norm", ctypes.c_void_p),
        ("output", _Matrix),
        ("mlp_norm", ctypes.c_void_p),
        ("gate", _Matrix),
        ("up", _Matrix),
        ("down", _Matrix),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("embedding", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("head", _Matrix),
        ("num_layers", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_key_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("mlp", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("is_half", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class _Step(ctypes.Structure):
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
    )


class _Chance(ctypes.Structure):
    _fields_ = (
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("top_k", ctypes.c_int64),
    )


class LlamaDecoder:
    """Packed forwards [n tokens] over a cache of blocks.

    It takes the model's weights with it: the modules it has read are left with tensors on the meta device, which have
    shapes and no memory. Not for two threads at once.

    Args:
        model: a transformers model without an `obstacle`.
        kind: how the weights of linear layers are kept; plain is the model's own dtype.
    """

    def __init__(self, model: Any, kind: Kind = "plain") -> None:
        config, inner = model.config, model.model
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._shape = Shape(
            config.num_attention_heads,
            config.num_key_value_heads,
            head_size,
            config.hidden_size,
            config.intermediate_size,
        )
        self._dtype: torch.dtype = model.dtype
        self._library = native.library()
        self._rotary = inner.rotary_emb
        arena = Arena()
        self._num_turns = 0
        self._taps: list[int] = []
        self._scratch, self._guess_logits = _Floats(), _Floats()
        self._waited = ctypes.c_double()
        self._step = _Step(waited=ctypes.pointer(self._waited))
        with torch.inference_mode():
            embedding = inner.embed_tokens.weight.detach()
            half = half_of(len(embedding))
            self._embedding = arena.keep(panels(embedding, half))
            self._layers = [take_layer(layer, self._shape, kind, arena) for layer in inner.layers]
            self._norm = norm_weight(inner.norm)
            head = model.lm_head.weight
            if head is inner.embed_tokens.weight and kind != "int8":
                self._head = Matrix(head.shape[0], head.shape[1], half, self._embedding)
            else:
                self._head = Matrix.of(head, None, kind, arena)
        epsilon = inner.norm.variance_epsilon
        empty(model.lm_head, inner.embed_tokens)
        self.vocab_size = self._head.num_outputs
        self.kv_bytes_per_token = (
            2 * len(self._layers) * self._shape.num_key_heads * head_size * self._embedding.element_size()
        )
        is_half = self._dtype == torch.bfloat16
        self._model = _Model(
            (_Layer * len(self._layers))(*(_layer(layer) for layer in self._layers)),
            self._embedding.data_ptr(),
            self._norm.data_ptr(),
            _matrix(self._head),
            len(self._layers),
            self._shape.hidden_size,
            self._shape.num_heads,
            self._shape.num_key_heads,
            head_size,
            self._shape.mlp_size,
            _INT8 if kind == "int8" else _BFLOAT16 if is_half else _FLOAT32,
            is_half,
            epsilon,
            head_size**-0.5,
        )
        self.allocate(0, 1)

    def allocate(self, num_slots: int, block_size: int) -> None:
        """Make the cache, all layers in one tensor [layers, 2K, slots, D].

        Args:
            num_slots: tokens there is room for.
            block_size: how many of a sequence's tokens lie in one piece.
        """
        heads, size = 2 * self._shape.num_key_heads, self._shape.head_size
        slots = -(-num_slots // _SLOTS_GRAIN) * _SLOTS_GRAIN
        self._cache = zeros((len(self._layers), heads, slots, size), self._dtype)
        self._step.num_slots, self._step.block, self._step.cache = slots, block_size, self._cache.data_ptr()

    def forward(self, layout: Layout) -> Tensor:
        """The wanted logits [len(wanted), V] float32; states go into the cache, tapped ones to the layout."""
        logits = torch.empty(len(layout.wanted), self.vocab_size)
        self._prepare(layout, logits.data_ptr())
        if not layout.is_tapped:
            self._run(self._library.forward)
            return logits
        states = torch.empty(len(layout.tokens), len(self._taps), self._shape.hidden_size)
        self._step.num_taps, self._step.states = len(self._taps), states.data_ptr()
        self._run(self._library.forward)
        layout.states = states.to(self._dtype)
        return logits

    def tap(self, taps: Sequence[Tap]) -> None:
        """Add hidden states to those that a layout is given if it wants them."""
        places = (len(self._layers) if tap == "final" else tap for tap in taps)
        self._taps = list(dict.fromkeys([*self._taps, *places]))
        self._tap_places = (ctypes.c_int64 * len(self._taps))(*self._taps)
        self._step.taps = ctypes.addressof(self._tap_places)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [n, hidden] of tokens [n] int64."""
        assert not len(tokens) or 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size, "no such token"
        found = torch.empty(len(tokens), self._shape.hidden_size)
        self._library.embed(ctypes.byref(self._model), tokens.data_ptr(), len(tokens), found.data_ptr())
        return found.to(self._dtype)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] float32 of final hidden states [n, hidden]."""
        hidden = hidden.float().contiguous()
        logits = torch.empty(len(hidden), self.vocab_size)
        self._size_step(len(hidden), len(hidden), 0, logits.data_ptr())
        self._run(self._library.head, hidden.data_ptr())
        return logits

    def move(self, moves: Moves) -> None:
        """Copy tokens' keys and values from slots to others, one after another."""
        slots = (ctypes.c_int64 * (2 * len(moves)))(*chain.from_iterable(moves))
        self._library.move(ctypes.byref(self._model), ctypes.byref(self._step), slots, len(moves))

    def guess(
        self, layout: Layout, counts: Sequence[int], draws: Sequence[Draw | None], num_tokens: int
    ) -> Continuations:
        """Continuations of sequences; keys and values of all but their last tokens go into the cache.

        Args:
            layout: of each sequence's tokens that the cache lacks, then any in the places of those that are to be
                found; wanted are the logits of the tokens before these, sequence by sequence.
            counts: tokens to find for each sequence, at least 1.
            draws: how those of each sequence are drawn; None takes the likeliest.
            num_tokens: of these first tokens of the vocabulary.

        Returns:
            A continuation for each; shorter where its largest logit is no finite number.
        """
        num_wanted = len(layout.wanted)
        q = torch.empty(num_wanted, num_tokens) if any(draws) else None
        self._prepare(layout, self._guess_logits.at_least(len(counts) * self.vocab_size))
        found = (ctypes.c_int64 * num_wanted)()
        uniforms = [draw.uniforms if draw else [0.0] * count for draw, count in zip(draws, counts, strict=True)]
        self._run(
            self._library.guess,
            (ctypes.c_int64 * len(counts))(*counts),
            len(counts),
            num_tokens,
            (_Chance * len(draws))(*map(_chance, draws)),
            (ctypes.c_double * num_wanted)(*chain.from_iterable(uniforms)),
            _address(q),
            found,
        )
        continuations = Continuations([])
        for begin, count, draw in zip(accumulate(counts, initial=0), counts, draws, strict=False):
            one = found[begin : begin + count]
            one = one[: one.index(-1)] if -1 in one else one
            if draw is not None and q is not None:
                continuations.q[len(continuations.tokens)] = q[begin : begin + len(one)]
            continuations.tokens.append(one)
        return continuations

    def _run(self, call: Callable[..., None], *others: Any) -> None:
        """Call the library for the step that was prepared, and tell the crew what its threads lost."""
        self._waited.value = 0.0
        begin = perf_counter()
        call(ctypes.byref(self._model), ctypes.byref(self._step), *others)
        CREW.learn(self._step.num_threads, perf_counter() - begin, self._waited.value)

    def _prepare(self, layout: Layout, logits: int) -> None:
        """Say in the step what this call is to do; `logits` is the address where they go."""
        step, most_keys = self._step, max(span.num_keys for span in layout.spans)
        self._turn_to(most_keys)
        step.rows, step.wanted = _rows(layout), (ctypes.c_int64 * len(layout.wanted))(*layout.wanted)
        self._size_step(len(layout.tokens), len(layout.wanted), most_keys, logits)

    def _size_step(self, num_rows: int, num_wanted: int, most_keys: int, logits: int) -> None:
        """Put sizes into the step, without hidden states, and make room for them."""
        step = self._step
        step.num_rows, step.num_wanted, step.most_keys, step.num_taps = num_rows, num_wanted, most_keys, 0
        step.num_threads, step.logits = CREW.size(torch.get_num_threads()), logits
        step.scratch = self._scratch.at_least(
            self._library.scratch_floats(ctypes.byref(self._model), ctypes.byref(step))
        )

    def _turn_to(self, num_positions: int) -> None:
        """Rotations [positions, D/2] complex64; the table grows by doubling."""
        if num_positions > self._num_turns:
            num = max(2 * num_positions, 512)
            cosines, sines = self._rotary(torch.empty(0), torch.arange(num)[None])
            half = self._shape.head_size // 2
            self._turns = torch.complex(cosines[0, :, :half], sines[0, :, :half])
            self._num_turns, self._step.turns = num, self._turns.data_ptr()


class _Floats:
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


def _rows(layout: Layout) -> Any:
    """The fields of `Row` in the C++ source for each token, as one array."""
    tokens, slots = layout.tokens, [-1] * len(layout.tokens)
    for start, stop, slot in layout.pieces:
        slots[start:stop] = range(slot, slot + stop - start)
    found: list[int] = []
    for span in layout.spans:
        address = 0 if span.slots is None else span.slots.data_ptr()
        for place in range(span.start, span.stop):
            position = span.position + place - span.start
            found += (tokens[place], position, slots[place], span.first_slot, address, span.num_in_order)
    return (ctypes.c_int64 * len(found))(*found)


def _layer(layer: Layer) -> _Layer:
    return _Layer(
        layer.input_norm.data_ptr(),
        _matrix(layer.qkv),
        _address(layer.head_norm),
        _matrix(layer.out),
        layer.mlp_norm.data_ptr(),
        _matrix(layer.gate),
        _matrix(layer.up),
        _matrix(layer.down),
    )


def _chance(draw: Draw | None) -> _Chance:
    if draw is None:
        return _Chance(0.0, 1.0, 0.0, 0)
    return _Chance(max(draw.temperature, torch.finfo(torch.float32).tiny), draw.top_p, draw.min_p, draw.top_k or 0)


def _matrix(matrix: Matrix) -> _Matrix:
    addresses = [_address(tensor) for tensor in (matrix.weight, matrix.scales, matrix.sums, matrix.bias)]
    return _Matrix(*addresses, matrix.num_outputs, matrix.num_inputs, matrix.half)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
