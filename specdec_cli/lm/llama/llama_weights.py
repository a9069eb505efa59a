"""A model's weights, taken from transformers' modules and laid out as our decoder reads them.

The two halves that a rotation pairs stand side by side (one complex product turns queries and keys), so that nothing is
moved at run time.

Letters: H query heads, K key heads, D head size, R rotated numbers of it, I MLP width, E experts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from specdec_cli.lm.cache.memory import Arena, return_freed_memory
from specdec_cli.lm.kernels.block_sizes import INT4, INT8
from specdec_cli.lm.kernels.kinds import Kind
from specdec_cli.lm.kernels.linear import quantized
from specdec_cli.lm.llama import native
from specdec_cli.lm.llama.families import Family
from specdec_cli.lm.llama.file_rows import FileRows
from specdec_cli.lm.llama.quantized_rows import QuantizedRows

_PANELS = 64, 32, 16  # outputs in a panel: those of the compiled decoder, as many as its processor likes and fewer
_PACK_BYTES = 4  # inputs that meet their weights at once
_LEAST = _PANELS[-1]
_SUMMED = 1024  # outputs whose int8 weights are int32 together while they are summed
_Linear = tuple[Tensor | FileRows, Tensor | None]  # a weight and its bias


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder, by the letters of this file."""

    num_heads: int
    num_key_heads: int
    head_size: int
    num_turned: int
    hidden_size: int

    def kv_bytes(self, num_layers: int, dtype: torch.dtype) -> int:
        """Memory of one token's keys and values in so many layers."""
        return 2 * num_layers * self.num_key_heads * self.head_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer's weight as the compiled decoder reads it, entries for what fills the last panel included.

    Args:
        num_outputs: without what fills the last panel.
        num_inputs: without what fills the last pack.
        half: outputs in the first half of them.
        weight: in `panels`; float32, bfloat16, int8, or uint8 of blocks.
        panels: [outputs / lanes, 2] int64 of blocks: where each panel begins in the weight, and its type; else None.
        bias: float32, or None.
        scales: float32, of int8 weights, else None.
        sums: int32, of each output's int8 weights, else None.
        by: what a product is multiplied with, bias included.
        rows: the file's, of blocks, until they are checked; their outputs one after another.
        file: the rows where they are, if the matrix is looked up there; the weight is empty then.
    """

    num_outputs: int
    num_inputs: int
    half: int
    weight: Tensor
    bias: Tensor | None = None
    panels: Tensor | None = None
    scales: Tensor | None = None
    sums: Tensor | None = None
    by: float = 1.0
    rows: list[FileRows] = field(default_factory=list)
    file: FileRows | None = None

    @classmethod
    def of(
        cls, weight: Tensor | FileRows, bias: Tensor | None, kind: Kind, arena: Arena, unit: int = 1, by: float = 1.0
    ) -> Matrix:
        """A weight [out, in] kept as `kind` says; threads do not part a unit of its outputs."""
        if isinstance(weight, FileRows):
            return cls.of_rows([weight], bias, arena, unit, by)
        assert kind != "int4", "plain numbers become blocks as rows"
        num_outputs, num_inputs = weight.shape
        half = half_of(num_outputs, unit)
        bias = None if bias is None else _of_panels(bias.detach().float())
        if kind != "int8":
            return cls(num_outputs, num_inputs, half, panels(weight.detach(), half, arena), bias, by=by)
        return cls(num_outputs, num_inputs, half, weight, bias, by=by)._quantized(weight.detach(), arena)

    @classmethod
    def of_rows(
        cls, parts: Sequence[FileRows], bias: Tensor | None, arena: Arena, unit: int = 1, by: float = 1.0
    ) -> Matrix:
        """A weight whose outputs are rows of a file, in blocks as they lie there; parts one after another.

        Its memory is laid out and not written: that is `fill`.
        """
        library, num_inputs = native.layouts(), parts[0].num_inputs
        lanes = int(library.block_outputs())
        num_bytes = [int(library.block_panel_bytes(part.type, num_inputs)) for part in parts]
        counts = [-(-len(part.order) // lanes) for part in parts]
        whole = arena.zeros(sum(size * count for size, count in zip(num_bytes, counts, strict=True)))
        places, begin = [], 0
        for part, size, count in zip(parts, num_bytes, counts, strict=True):
            end = begin + size * count
            places.append(torch.stack((torch.arange(begin, end, size), torch.full((count,), part.type)), 1))
            begin = end
        num_outputs = sum(len(part.order) for part in parts)
        bias = None if bias is None else _of_panels(bias.detach().float())
        half = half_of(num_outputs, unit)
        return cls(num_outputs, num_inputs, half, whole, bias, torch.cat(places), by=by, rows=list(parts))

    @classmethod
    def in_file(cls, rows: FileRows) -> Matrix:
        """An embedding that stays in its mapped file: a forward reads a row for each token, no product all."""
        assert torch.equal(rows.order, torch.arange(len(rows))), "the tokens are in a file's order"
        weight = torch.empty(0, dtype=torch.uint8)
        return cls(len(rows), rows.num_inputs, half_of(len(rows)), weight, rows=[rows], file=rows)

    def fill(self) -> None:
        """Write the rows of a file, if that is what it consists of.

        Raises:
            NotFiniteError: a scale is no finite number.
        """
        if self.file is not None:
            self.file.check()
            return
        begin, lanes = 0, int(native.layouts().block_outputs())
        for part in self.rows:
            assert self.panels is not None, "it is in blocks"
            part.fill(self.weight[int(self.panels[begin, 0]) :])
            begin += -(-len(part) // lanes)

    def copied(self, kind: Kind, arena: Arena, *, is_head: bool = False) -> Matrix:
        """The same matrix quantized as `kind` says, made of the weight as it lies here."""
        assert self.panels is None, "quantized copies of blocks are refused"
        weight = from_panels(self.weight, self.half, (self.num_outputs, self.num_inputs))
        if kind == "int8":
            return self._quantized(weight, arena)
        assert kind == "int4", f"no matrix is copied as {kind}"
        rows = QuantizedRows.of("weight", "the target", weight, INT8 if is_head else INT4)
        made = replace(Matrix.of_rows([rows], None, arena, by=self.by), half=self.half, bias=self.bias)
        made.fill()
        made.rows.clear()
        return made

    def _quantized(self, weight: Tensor, arena: Arena) -> Matrix:
        """This matrix with a weight [out, in] in int8."""
        whole, scales = quantized(weight)
        sums = _of_panels(torch.cat([some.sum(1, dtype=torch.int32) for some in torch.split(whole, _SUMMED)]))
        return replace(self, weight=panels(whole, self.half, arena), scales=_of_panels(scales), sums=sums)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """An MLP's weights: an expert's, or those of a layer without experts.

    Args:
        gate: to the MLP's gate.
        up: to what it lets through.
        down: back to the residual stream.
    """

    gate: Matrix
    up: Matrix
    down: Matrix

    def copied(self, kind: Kind, arena: Arena) -> GatedMLP:
        """The same MLP, quantized."""
        return GatedMLP(*(matrix.copied(kind, arena) for matrix in (self.gate, self.up, self.down)))


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights. Norms are [hidden] float32, or None where the layer has none there.

    Args:
        input_norm: before attention.
        qkv: to queries, keys and values, [H + 2K, D] in all.
        head_norm: [H + K, D] float32, of queries and keys, or None.
        out: back to the residual stream.
        output_norm: of what attention adds.
        mlp_norm: before the MLP.
        router: to the experts' scores [E] in float32, or None.
        mlps: the experts, or the one MLP.
        down_norm: of what the MLP adds.
        sinks: [H] float32 scores that take probability and give nothing, or None.
        window: how many keys a row sees at most; 0 for all.
        rotation: the table of rotations; -1 for none.
        scale: of attention scores.
        ahead: how many keys behind its own a row of a draft's block sees.
    """

    input_norm: Tensor | None
    qkv: Matrix
    head_norm: Tensor | None
    out: Matrix
    output_norm: Tensor | None
    mlp_norm: Tensor | None
    router: Matrix | None
    mlps: list[GatedMLP]
    down_norm: Tensor | None
    sinks: Tensor | None
    window: int
    rotation: int
    scale: float
    ahead: int = 0

    def copied(self, kind: Kind, arena: Arena) -> Layer:
        """The same layer, quantized as `Taking` would take it: experts and their router stay plain."""
        mlps = self.mlps if self.router is not None else [mlp.copied(kind, arena) for mlp in self.mlps]
        return replace(self, qkv=self.qkv.copied(kind, arena), out=self.out.copied(kind, arena), mlps=mlps)


def half_of(num_outputs: int, unit: int = 1) -> int:
    """How many of a matrix' outputs are its first half: whole units, and whole panels of the smallest kind."""
    grain = math.lcm(_LEAST, unit)
    return num_outputs // 2 // grain * grain


def panels(weight: Tensor, half: int, arena: Arena) -> Tensor:
    """A matrix [out, in] as the compiled decoder reads it (see its `Matrix`), in one piece of an arena."""
    pack = _PACK_BYTES // weight.element_size()
    missing = -weight.shape[0] % _LEAST, -weight.shape[1] % pack
    filled = nn.functional.pad(weight, (0, missing[1], 0, missing[0])) if any(missing) else weight  # pad always copies
    whole = arena.zeros(filled.numel() * weight.element_size()).view(weight.dtype)
    for start, stop, outputs in _stretches(half, len(filled)):
        panel = filled[start:stop].view(-1, outputs, filled.shape[1] // pack, pack).transpose(1, 2)
        whole[start * filled.shape[1] : stop * filled.shape[1]].view(panel.shape).copy_(panel)
    return whole


def from_panels(found: Tensor, half: int, shape: tuple[int, int]) -> Tensor:
    """The matrix [out, in] that lies in `panels`."""
    pack = _PACK_BYTES // found.element_size()
    num_inputs = shape[1] + -shape[1] % pack
    filled = torch.empty(found.numel() // num_inputs, num_inputs, dtype=found.dtype)
    for start, stop, outputs in _stretches(half, len(filled)):
        panel = found[start * num_inputs : stop * num_inputs].view(-1, num_inputs // pack, outputs, pack)
        filled[start:stop] = panel.transpose(1, 2).reshape(stop - start, num_inputs)
    return filled[: shape[0], : shape[1]]


def _stretches(half: int, num_outputs: int) -> Iterator[tuple[int, int, int]]:
    """Outputs start…stop-1 that lie in panels of so many outputs, one stretch after the other."""
    start, most = 0, native.layouts().panel_outputs()
    for end, outputs in itertools.product((half, num_outputs), (size for size in _PANELS if size <= most)):
        stop = start + (end - start) // outputs * outputs
        yield start, stop, outputs
        start = stop


def _of_panels(values: Tensor) -> Tensor:
    """One value for each output of the panels, in memory of its own."""
    return nn.functional.pad(values, (0, -len(values) % _LEAST)).contiguous()


def norm_weight(module: Any, family: Family) -> Tensor:
    """The factors of an RMS norm, float32, in memory of their own."""
    weight: Tensor = module.weight.detach().float()
    return weight + 1.0 if family.adds_one else weight.clone()


def epsilon_of(norm: Any) -> float:
    """The number that an RMS norm adds to the mean square; its families have two names for it."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


@dataclass(frozen=True, slots=True)
class Taking:
    """Takes the weights of a model's layers in this decoder's layout; the modules are left without them.

    Args:
        shape: of the model.
        family: of the model.
        kind: how the weights of linear layers are kept. Experts stay as they are, in blocks or plain.
        arena: where.
        by: what each layer's additions to the residual stream are multiplied with.
    """

    shape: Shape
    family: Family
    kind: Kind
    arena: Arena
    by: float = 1.0

    def layer(self, layer: Any, window: int, rotation: int) -> Layer:
        """One layer with its window and its table of rotations."""
        attention, mlp = layer.self_attn, layer.mlp
        norms = [norm_weight(getattr(layer, name), self.family) if name else None for name in self.family.norms]
        sinks = getattr(attention, "sinks", None)
        out = attention.o_proj
        router = getattr(mlp, self.family.router) if hasattr(mlp, "experts") else None
        taken = Layer(
            norms[0],
            self._qkv(attention),
            self._head_norm(attention) if hasattr(attention, "q_norm") else None,
            Matrix.of(*linear(out), self.kind, self.arena, by=self.by),
            norms[1],
            norms[2],
            None if router is None else self._router(router),
            [self._mlp(mlp)] if router is None else self._experts(mlp.experts),
            norms[3],
            None if sinks is None else sinks.detach().float(),
            window,
            rotation if getattr(attention, "use_rope", True) else -1,
            float(attention.scaling),
        )
        empty(*(module for part in (attention, mlp) for module in part.modules()))
        return taken

    def _qkv(self, attention: Any) -> Matrix:
        order = _turning_order(self.shape)
        is_joined = hasattr(attention, "qkv_proj")
        parts = [attention.qkv_proj] if is_joined else [attention.q_proj, attention.k_proj, attention.v_proj]
        bias = None
        if any(part.bias is not None for part in parts):
            biases = [part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts]
            bias = torch.cat(biases)[order]
        weights = [linear(part)[0] for part in parts]
        rows = [weight for weight in weights if isinstance(weight, FileRows)]
        if rows:  # in whose place no output leaves its part
            begins = itertools.accumulate(map(len, rows), initial=0)
            own = [part[order[begin : begin + len(part)] - begin] for part, begin in zip(rows, begins, strict=False)]
            own = QuantizedRows.in_whole_panels(own)
            return Matrix.of_rows(own, bias, self.arena, self.shape.head_size)
        weight = torch.cat([weight for weight in weights if isinstance(weight, Tensor)])[order]
        return Matrix.of(weight, bias, self.kind, self.arena, self.shape.head_size)

    def _head_norm(self, attention: Any) -> Tensor:
        """Norms of queries and keys as one, [H + K, D]."""
        shape = self.shape
        counts = ((attention.q_norm, shape.num_heads), (attention.k_norm, shape.num_key_heads))
        repeated = [
            norm_weight(module, self.family).repeat(1 if self.family.norms_whole_width else count)
            for module, count in counts
        ]
        whole = torch.cat(repeated)
        return whole[_turning_order(shape)[: len(whole)]].view(-1, shape.head_size)

    def _mlp(self, mlp: Any) -> GatedMLP:
        if hasattr(mlp, "gate_up_proj"):
            gate, up = _halves(*linear(mlp.gate_up_proj))
        else:
            gate, up = linear(mlp.gate_proj), linear(mlp.up_proj)
        return self._gated(gate, up, linear(mlp.down_proj), self.kind)

    def _router(self, router: Any) -> Matrix:
        """The router in float32, whatever the experts are in: a rounding may choose another expert."""
        return Matrix.of(router.weight.float(), getattr(router, "bias", None), "plain", self.arena)

    def _experts(self, experts: Any) -> list[GatedMLP]:
        return [self._gated(*parts, "plain") for parts in expert_layers(experts, self.family)]

    def _gated(self, gate: _Linear, up: _Linear, down: _Linear, kind: Kind) -> GatedMLP:
        first, second = (Matrix.of(*part, kind, self.arena) for part in (gate, up))
        return GatedMLP(first, second, Matrix.of(*down, kind, self.arena, by=self.by))


def linear(module: Any) -> _Linear:
    """A linear layer's or an embedding's weight, in the blocks of a file where it has them, and its bias."""
    rows = getattr(module, "file_rows", None)
    return module.weight if rows is None else rows, getattr(module, "bias", None)


def expert_layers(experts: Any, family: Family) -> Iterator[tuple[_Linear, _Linear, _Linear]]:
    """Gate, up and down of each expert, in the blocks of a file where it has them.

    transformers keeps [E, 2I, hidden] and [E, hidden, I], or each of them transposed with gate and up number by number.
    """
    is_limited, in_blocks = family.has_limited_experts, getattr(experts, "expert_rows", None)
    for expert in range(len(experts.down_proj)):
        joined, down = (
            weight[expert].t() if is_limited else weight[expert] for weight in (experts.gate_up_proj, experts.down_proj)
        )
        first, last = (
            None if bias is None else bias[expert]
            for bias in (getattr(experts, f"{name}_bias", None) for name in ("gate_up_proj", "down_proj"))
        )
        gate, up = _halves(joined, first, are_mixed=is_limited)
        if in_blocks is None:
            yield gate, up, (down, last)
        else:
            rows = in_blocks[expert]
            yield (rows[0], gate[1]), (rows[1], up[1]), (rows[2], last)


def _halves(weight: Tensor | FileRows, bias: Tensor | None, *, are_mixed: bool = False) -> tuple[_Linear, _Linear]:
    """Gate and up of a joined weight [2I, hidden], one behind the other or number by number."""
    half = len(weight) // 2
    places = (slice(0, None, 2), slice(1, None, 2)) if are_mixed else (slice(half), slice(half, None))
    gate, up = ((weight[place], None if bias is None else bias[place]) for place in places)
    return gate, up


def _pair_order(shape: Shape) -> Tensor:
    """A head's numbers [D] with those that a rotation pairs side by side, and then those that it leaves alone."""
    turned = torch.arange(shape.num_turned).view(2, -1).t().reshape(-1)
    return torch.cat((turned, torch.arange(shape.num_turned, shape.head_size)))


def _turning_order(shape: Shape) -> Tensor:
    """Rows of the joined weight [(H + 2K) · D] as this decoder wants them: values as they are."""
    num_heads = shape.num_heads + shape.num_key_heads
    turned = torch.arange(num_heads)[:, None] * shape.head_size + _pair_order(shape)
    first_value = num_heads * shape.head_size
    values = torch.arange(first_value, first_value + shape.num_key_heads * shape.head_size)
    return torch.cat((turned.reshape(-1), values))


def empty(*modules: Any) -> None:
    """Leave modules with weights that have a shape and no memory; tied ones stay tied."""
    emptied: dict[int, nn.Parameter] = {}
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            shape = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            setattr(module, name, emptied.setdefault(id(parameter), shape))
    return_freed_memory()
