"""The compiled decoder's `Model`: what it has to know of layers, beside their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from specdec_cli.lm.llama.families import ACTIVATIONS, LIMITED_SILU, Family, activation_of, turned_share
from specdec_cli.lm.llama.llama_weights import Layer, Shape, Taking
from specdec_cli.lm.llama.structures import LayerFields, ModelFields, layer_fields


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
