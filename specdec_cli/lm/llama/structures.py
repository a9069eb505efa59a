"""The structures of the compiled decoder's source, field by field, and our weights as these."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.cache.layout import Layout
from specdec_cli.lm.door import Draw
from specdec_cli.lm.llama.llama_weights import GatedMLP, Layer, Matrix


class MatrixFields(ctypes.Structure):
    """`Matrix`."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("panels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_int64),
        ("in", ctypes.c_int64),
        ("half", ctypes.c_int64),
        ("by", ctypes.c_float),
    )


class GatedMLPFields(ctypes.Structure):
    """`GatedMLP`."""

    _fields_ = (("gate", MatrixFields), ("up", MatrixFields), ("down", MatrixFields))


class LayerFields(ctypes.Structure):
    """`Layer`."""

    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("qkv", MatrixFields),
        ("head_norm", ctypes.c_void_p),
        ("output", MatrixFields),
        ("output_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("router", MatrixFields),
        ("mlps", ctypes.POINTER(GatedMLPFields)),
        ("down_norm", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("ahead", ctypes.c_int64),
        ("rotation", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class ModelFields(ctypes.Structure):
    """`Model`."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerFields)),
        ("embedding", MatrixFields),
        ("norm", ctypes.c_void_p),
        ("head", MatrixFields),
        ("num_layers", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_key_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("num_turned", ctypes.c_int64),
        ("mlp", ctypes.c_int64),
        ("num_experts", ctypes.c_int64),
        ("num_taken", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("norms_whole_width", ctypes.c_int64),
        ("norms_outputs", ctypes.c_int64),
        ("shares_sum_to_one", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
        ("embedding_scale", ctypes.c_float),
        ("score_cap", ctypes.c_float),
        ("logit_cap", ctypes.c_float),
        ("steepness", ctypes.c_float),
        ("limit", ctypes.c_float),
    )


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


def rows_of(layout: Layout) -> Any:
    """The fields of `Row` in the C++ source for each token, as one array."""
    tokens, slots = layout.tokens, [-1] * len(layout.tokens)
    for start, stop, slot in layout.pieces:
        slots[start:stop] = range(slot, slot + stop - start)
    found: list[int] = []
    for span in layout.spans:
        place_of_slots = 0 if span.slots is None else span.slots.data_ptr()
        for place in range(span.start, span.stop):
            position = span.position + place - span.start
            found += (tokens[place], position, slots[place], span.first_slot, place_of_slots, span.num_in_order)
    return (ctypes.c_int64 * len(found))(*found)


def layer_fields(layer: Layer) -> LayerFields:
    """A layer's weights."""
    mlps = (GatedMLPFields * len(layer.mlps))(*(_mlp_fields(mlp) for mlp in layer.mlps))
    return LayerFields(
        address(layer.input_norm),
        matrix_fields(layer.qkv),
        address(layer.head_norm),
        matrix_fields(layer.out),
        address(layer.output_norm),
        address(layer.mlp_norm),
        MatrixFields() if layer.router is None else matrix_fields(layer.router),
        mlps,
        address(layer.down_norm),
        address(layer.sinks),
        layer.window,
        layer.ahead,
        layer.rotation,
        layer.scale,
    )


def _mlp_fields(mlp: GatedMLP) -> GatedMLPFields:
    return GatedMLPFields(*(matrix_fields(matrix) for matrix in (mlp.gate, mlp.up, mlp.down)))


def matrix_fields(matrix: Matrix) -> MatrixFields:
    """A matrix' weight and what belongs to it."""
    addresses = [address(tensor) for tensor in (matrix.weight, matrix.panels, matrix.scales, matrix.sums, matrix.bias)]
    return MatrixFields(*addresses, matrix.num_outputs, matrix.num_inputs, matrix.half, matrix.by)


def chance_fields(draw: Draw | None) -> ChanceFields:
    """How a continuation is drawn; None takes the likeliest tokens."""
    if draw is None:
        return ChanceFields(0.0, 1.0, 0.0, 0)
    tiny = torch.finfo(torch.float32).tiny
    return ChanceFields(max(draw.temperature, tiny), draw.top_p, draw.min_p, draw.top_k or 0)


def address(tensor: Tensor | None) -> int | None:
    """Where a contiguous tensor's numbers are; None for none."""
    assert tensor is None or tensor.is_contiguous(), "compiled code reads numbers in order"
    return None if tensor is None else tensor.data_ptr()
