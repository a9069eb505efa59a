"""A decoder of our own for Llama and families of its kind: RMS norms, rotary positions, grouped heads, gated MLPs.

A whole forward is one call of compiled code (`llama_step.cpp`): a small model's step would be spent in dispatch and a
large one's in products that read slower than memory gives. A row's numbers are computed in one order, whatever rows are
beside it, so that it has the same bits in any company, in every dtype. The weights are transformers' own, rearranged
(`llama_weights`), by what `families` says of the model. transformers' forward is the oracle; what is not known by name
goes through it, and everything does where there is no C++ compiler (`native`).
"""

from __future__ import annotations

import copy
import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.cache.contexts import ForwardInput, Moves
from specdec_cli.lm.cache.layout import KEY_GRAIN, Layout, Layouts
from specdec_cli.lm.cache.memory import Arena, zeros
from specdec_cli.lm.door import CHAIN, Continuations, DraftForm, Draw, Tap
from specdec_cli.lm.files.lengths import long_rope_threshold
from specdec_cli.lm.forward.forward import CacheShape, WithoutGraphs, WithoutState
from specdec_cli.lm.hidden_states import HiddenRoom, HiddenStates
from specdec_cli.lm.kernels.kinds import Kind
from specdec_cli.lm.llama.caller import Caller, Floats, Rotations, chances, token_rows
from specdec_cli.lm.llama.families import family_of, windows_of
from specdec_cli.lm.llama.file_rows import FileRows
from specdec_cli.lm.llama.llama_weights import Matrix, Taking, empty, epsilon_of, linear, norm_weight
from specdec_cli.lm.llama.model_fields import (
    ModelFields,
    layers_fields,
    matrix_fields,
    model_fields,
    shape_of,
)

_SLOTS_GRAIN = 16  # slots, whose keys the compiled code reads together: its WIDTH


class LlamaDecoder(WithoutGraphs, WithoutState):
    """Packed forwards [n tokens] over a cache of blocks: a `Forward` (`lm.forward.forward`).

    It takes the model's weights with it: the modules it has read are left with tensors on the meta device, which have
    shapes and no memory. Not for two threads at once.

    Args:
        model: a transformers model without an `obstacle`.
        kind: how the weights of linear layers are kept; plain is the model's own dtype.
        layouts: makes the layouts of its forwards.
    """

    name = "own"
    can_guess = can_draw = True
    can_branch = False
    spreads_nan = False  # attention reads a row's own keys alone
    has_taken_cache = False  # a CPU's memory is taken as it is written
    graphs_obstacle: str | None = None

    def __init__(self, model: Any, kind: Kind, layouts: Layouts) -> None:
        config, inner, family = model.config, model.model, family_of(model)
        self.layouts = layouts
        self._sizes = shape_of(config, family)
        self._dtype: torch.dtype = model.dtype
        self._kind, self._caller = kind, Caller(kind, self._dtype)
        self._library, self._step = self._caller.library, self._caller.step
        self._rotations = Rotations(inner.rotary_emb, self._sizes.num_turned, long_rope_threshold(config))
        arena = Arena()
        self._taps: list[int] = []
        self._guess_logits = Floats()
        with torch.inference_mode():
            self._embedding_scale = _embedding_scale(inner.embed_tokens)
            (table, _), (head, _) = linear(inner.embed_tokens), linear(model.lm_head)
            is_one = head is table
            if isinstance(table, FileRows) and table.mapped is not None and not is_one:
                self._embedding = Matrix.in_file(table)
            else:
                self._embedding = Matrix.of(table, None, "plain", arena)
            del table  # before the next matrix is copied
            if not is_one:
                empty(inner.embed_tokens)
            by, is_tied = 1.0 / config.logits_scaling if family.has_multipliers else 1.0, is_one and kind != "int8"
            self._head = replace(self._embedding, by=by) if is_tied else Matrix.of(head, None, kind, arena, by=by)
            del head
            empty(model.lm_head, inner.embed_tokens)
            by = config.residual_multiplier if family.has_multipliers else 1.0
            taking = Taking(self._sizes, family, kind, arena, by)
            types = getattr(config, "layer_types", None) or [None] * len(inner.layers)
            modules = zip(inner.layers, windows_of(config, family), types, strict=False)
            self._layers = [taking.layer(module, window, self._rotations.of_layer(t)) for module, window, t in modules]
            self._norm = norm_weight(inner.norm, family)
        # Each by one thread: those that share a matrix wait for each other at its end, beside busy processes long.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            deque(pool.map(Matrix.fill, self._matrices()), maxlen=0)
        self.shape = CacheShape(self._sizes.kv_bytes(len(self._layers), self._dtype), self._head.num_outputs)
        self._caller.model = self._model = self._model_fields(model, taking)
        self.allocate(0)

    def has_rows_of_file(self) -> bool:
        """Whether some rows of each matrix in blocks are those of its file, which is left then."""
        are_rows = all(map(self._have_rows_of_file, self._parts()))
        for matrix in self._matrices():
            matrix.rows.clear()
        return are_rows

    def _matrices(self) -> Iterator[Matrix]:
        """Every matrix of the model."""
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[list[Matrix]]:
        """The matrices outside of layers and those of each layer; a tied embedding, which is the output layer, once."""
        yield [self._head] if self._head.weight is self._embedding.weight else [self._embedding, self._head]
        for layer in self._layers:
            yield [layer.qkv, layer.out, *chain.from_iterable((mlp.gate, mlp.up, mlp.down) for mlp in layer.mlps)]

    def _have_rows_of_file(self, matrices: Sequence[Matrix]) -> bool:
        """Whether matrices have some rows of their file; those of all experts, which are one tensor there, together."""
        of_tensors: dict[int, list[tuple[FileRows, Tensor]]] = {}
        for matrix in matrices:
            fields, begin = matrix_fields(matrix), 0
            for rows in matrix.rows:
                some = torch.tensor(sorted({0, len(rows) // 3, len(rows) - 1}))
                outputs, numbers = some + begin, torch.empty(len(some), matrix.num_inputs)
                addresses = outputs.data_ptr(), len(outputs), numbers.data_ptr()
                self._library.plain_rows(ctypes.byref(self._model), ctypes.byref(fields), *addresses)
                of_tensors.setdefault(id(rows.data), []).append((rows[some], numbers))
                begin += len(rows)
        for parts in of_tensors.values():
            rows = replace(parts[0][0], order=torch.cat([part.order for part, _ in parts]))
            are_rows = rows.are(torch.cat([numbers for _, numbers in parts]))
            rows.release()
            if not are_rows:
                return False
        return True

    def self_draft(self, num_layers: int | None, kind: Kind) -> LlamaDecoder:
        """A decoder made of this one's weights, with a cache and calls of its own.

        Args:
            num_layers: first layers that it has; None is all.
            kind: of its linear layers, which are a copy unless they are of this one's kind.
        """
        made = copy.copy(self)
        made._layers, made._taps = self._layers[:num_layers], []
        kv_bytes = self._sizes.kv_bytes(len(made._layers), self._dtype)
        made.shape = replace(self.shape, kv_bytes_per_token=kv_bytes)
        made._kind, made._guess_logits = kind, Floats()
        made._caller = Caller(made._kind, self._dtype)
        made._library, made._step = made._caller.library, made._caller.step
        made._caller.model = made._model = ModelFields.from_buffer_copy(self._model)
        if kind != self._kind:
            arena = Arena()
            made._layers = [layer.copied(kind, arena) for layer in made._layers]
            made._head = self._head.copied(kind, arena, is_head=True)
        made._model.head = matrix_fields(made._head)
        made._model.layers, made._model.num_layers = layers_fields(made._layers), len(made._layers)
        made.allocate(0)
        return made

    def _model_fields(self, model: Any, taking: Taking) -> ModelFields:
        config, norm = model.config, model.model.norm
        epsilon = epsilon_of(norm)
        made = model_fields(config, taking, self._layers, model.model.layers, epsilon)
        made.embedding, made.norm = matrix_fields(self._embedding), self._norm.data_ptr()
        made.head = matrix_fields(self._head)
        by = config.embedding_multiplier if taking.family.has_multipliers else 1.0
        made.embedding_scale = self._embedding_scale * by
        return made

    def allocate(self, num_blocks: int, num_prefix_states: int = 0) -> None:
        """Recreate the cache, all layers in one tensor [layers, 2K, slots, D]."""
        heads, size, block_size = 2 * self._sizes.num_key_heads, self._sizes.head_size, self.layouts.block_size
        num_slots = -(-(num_blocks * block_size + KEY_GRAIN) // _SLOTS_GRAIN) * _SLOTS_GRAIN
        self._cache = zeros((len(self._layers), heads, num_slots, size), self._dtype)
        self._step.num_slots, self._step.block, self._step.cache = num_slots, block_size, self._cache.data_ptr()

    def score(self, feeds: Sequence[ForwardInput]) -> Tensor:
        """The wanted logits [sum of num_logits, V] float32."""
        return self.layouts.score(feeds, self.run, self.shape.vocab_size)

    def run(self, layout: Layout) -> Tensor:
        """One forward: the wanted logits [len(wanted), V] float32; tapped states go to the layout."""
        logits = torch.empty(len(layout.wanted), self.shape.vocab_size)
        self._prepare(layout, logits.data_ptr())
        if not layout.is_tapped:
            self._caller.run(self._library.forward)
            return logits
        states, self._step.states = self._tapped.take(len(layout.tokens))
        self._step.num_taps = len(self._taps)
        self._caller.run(self._library.forward)
        layout.states = states if self._dtype == torch.float32 else HiddenStates.of(states.tensor().to(self._dtype))
        return logits

    def tap(self, taps: Sequence[Tap]) -> None:
        """Add hidden states to those that `score` gives to feeds that want them."""
        places = (len(self._layers) if tap == "final" else tap for tap in taps)
        self._taps = list(dict.fromkeys([*self._taps, *places]))
        self._tapped = HiddenRoom(len(self._taps), self._sizes.hidden_size)
        self._tap_places = (ctypes.c_int64 * len(self._taps))(*self._taps)
        self._step.taps = ctypes.addressof(self._tap_places)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [n, hidden] of tokens [n] int64."""
        assert not len(tokens) or 0 <= int(tokens.min()) <= int(tokens.max()) < self.shape.vocab_size, "no such token"
        rows = torch.empty(len(tokens), self._sizes.hidden_size)
        table = ctypes.byref(self._model.embedding)
        self._library.plain_rows(ctypes.byref(self._model), table, tokens.data_ptr(), len(tokens), rows.data_ptr())
        return (rows * self._embedding_scale).to(self._dtype)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] float32 of final hidden states [n, hidden]."""
        hidden = hidden.float().contiguous()
        logits = torch.empty(len(hidden), self.shape.vocab_size)
        self._caller.reserve(len(hidden), len(hidden), 0, logits.data_ptr())
        self._caller.run(self._library.head, hidden.data_ptr())
        return logits

    def move(self, moves: Moves) -> None:
        """Copy tokens' keys and values from slots to others, one after another."""
        slots = (ctypes.c_int64 * (2 * len(moves)))(*chain.from_iterable(moves))
        self._library.move(ctypes.byref(self._model), ctypes.byref(self._step), slots, len(moves))

    def wipe(self, blocks: Sequence[int]) -> None:
        """Nothing: no row reads what others have filed."""

    def guess(
        self,
        feeds: Sequence[ForwardInput],
        counts: Sequence[int],
        draws: Sequence[Draw | None],
        num_tokens: int,
        form: DraftForm,
    ) -> Continuations:
        """Continue sequences token by token in one call; all but their last new tokens go into the cache."""
        assert form == CHAIN, "the own decoder guesses chains"
        layout = self.layouts.of(feeds)
        num_wanted = len(layout.wanted)
        q = torch.empty(num_wanted, num_tokens) if any(draws) else None
        # The call overwrites one row of logits for each sequence, whose distributions are in q where they are needed.
        self._prepare(layout, self._guess_logits.at_least(len(counts) * self.shape.vocab_size))
        guessed = (ctypes.c_int64 * num_wanted)()
        uniforms = [draw.uniforms if draw else [0.0] * count for draw, count in zip(draws, counts, strict=True)]
        self._caller.run(
            self._library.guess,
            (ctypes.c_int64 * len(counts))(*counts),
            len(counts),
            num_tokens,
            chances(draws),
            (ctypes.c_double * num_wanted)(*chain.from_iterable(uniforms)),
            None if q is None else q.data_ptr(),
            guessed,
        )
        continuations = Continuations([])
        for i, (begin, count) in enumerate(zip(accumulate(counts, initial=0), counts, strict=False)):
            tokens = guessed[begin : begin + count]
            if -1 in tokens:  # its largest logit there is no finite number
                tokens = tokens[: tokens.index(-1)]
            continuations.tokens.append(tokens)
            if draws[i] is not None and q is not None:
                continuations.q[i] = q[begin : begin + len(tokens)]
        return continuations

    def _prepare(self, layout: Layout, logits: int) -> None:
        """Fill in the next call's fields; `logits` is the address where they go."""
        step, most_keys = self._step, max(span.num_keys for span in layout.spans)
        step.turns = self._rotations.address(most_keys)
        step.rows, step.wanted = token_rows(layout), (ctypes.c_int64 * len(layout.wanted))(*layout.wanted)
        self._caller.reserve(len(layout.tokens), len(layout.wanted), most_keys, logits)


def _embedding_scale(embedding: Any) -> float:
    """The factor of a family's embeddings, rounded to their dtype as transformers rounds it."""
    scale = getattr(embedding, "embed_scale", None)
    return 1.0 if scale is None else float(scale.to(embedding.weight.dtype))
