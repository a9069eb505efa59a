"""The compiled decoder's `Model`, field by field: its layers' weights, and what else it has to know of them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdec_cli.lm.llama.families import ACTIVATIONS, LIMITED_SILU, Family, activation_of, turned_share
from specdec_cli.lm.llama.llama_weights import GatedMLP, Layer, Matrix, Shape, Taking


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
        ("file_type", ctypes.c_int64),
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


def layers_fields(layers: Sequence[Layer]) -> Any:
    """An array of layers."""
    return (LayerFields * len(layers))(*map(layer_fields, layers))


def model_fields(
    config: Any, taking: Taking, layers: Sequence[Layer], modules: Sequence[Any], epsilon: float
) -> ModelFields:
    """A model of layers alone, without an embedding, a final norm and an output layer.

    Args:
        config: of the model.
        taking: that took the layers' weights.
        layers: these weights.
        modules: transformers' modules that they were taken from.
        epsilon: of its norms.
    """
    family, shape = taking.family, taking.shape
    routers = [module.mlp for module, its in zip(modules, layers, strict=True) if its.router]
    router = getattr(routers[0], family.router) if routers else None
    limited = routers[0].experts if family.has_limited_experts else None
    activation = LIMITED_SILU if limited is not None else ACTIVATIONS[str(activation_of(config))]
    return ModelFields(
        layers=layers_fields(layers),
        num_layers=len(layers),
        hidden=shape.hidden_size,
        num_heads=shape.num_heads,
        num_key_heads=shape.num_key_heads,
        head_size=shape.head_size,
        num_turned=shape.num_turned,
        mlp=max(mlp.gate.num_outputs for layer in layers for mlp in layer.mlps),
        num_experts=0 if router is None else router.num_experts,
        num_taken=1 if router is None else router.top_k,
        activation=activation,
        norms_whole_width=family.norms_whole_width,
        norms_outputs=bool(family.norms[1] or family.norms[3]),
        shares_sum_to_one=getattr(router, "norm_topk_prob", True),
        epsilon=epsilon,
        embedding_scale=1.0,
        score_cap=(config.attn_logit_softcapping or 0.0) if family.caps_scores else 0.0,
        logit_cap=getattr(config, "final_logit_softcapping", None) or 0.0,
        steepness=limited.alpha if limited is not None else 1.0,
        limit=limited.limit if limited is not None else math.inf,
    )


def shape_of(config: Any, family: Family) -> Shape:
    """Sizes of the layers of a configuration."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = turned_share(config.rope_parameters) if family.is_partly_turned else 1.0
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    return Shape(heads, key_heads, head_size, int(head_size * share), config.hidden_size)


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
    sizes, file_type = (matrix.num_outputs, matrix.num_inputs, matrix.half), 0
    if matrix.file is not None:
        addresses[0], file_type = matrix.file.data.ctypes.data, 1 + matrix.file.type
    return MatrixFields(*addresses, *sizes, matrix.by, file_type)


def address(tensor: Tensor | None) -> int | None:
    """Where a contiguous tensor's numbers are; None for none."""
    assert tensor is None or tensor.is_contiguous(), "compiled code reads numbers in order"
    return None if tensor is None else tensor.data_ptr()
