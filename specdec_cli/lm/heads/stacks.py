"""The layers and the products that a draft head is built of, by what this machine runs fastest.

On a CPU our own decoder's compiled code runs both; where it does not, layers are torch's operators, and products those
that a model has there.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec_cli.lm.heads.compiled_stack import DTYPES, CompiledProduct, CompiledStack
from specdec_cli.lm.heads.layer_stack import BlockLayer, LayerStack, TorchStack
from specdec_cli.lm.kernels.kinds import kind_for, pack
from specdec_cli.lm.llama import native
from specdec_cli.lm.llama.families import FAMILIES, Family, config_obstacle, family_of_layer, unknown_module

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM
    from specdec_cli.lm.heads.transformers_layer import TransformersLayer

_LONG_ROPE = "longrope"  # whose frequencies follow the longest position of a call


def stack_of(
    config: Any, weights: MutableMapping[str, Tensor], target: LM, block_layers: Sequence[BlockLayer] | None = None
) -> LayerStack:
    """The layers of a published head.

    Args:
        config: as for `TorchStack`.
        weights: likewise; what compiled code takes leaves its shape.
        target: the loaded target, in whose dtype and blocks they compute.
        block_layers: as for `TorchStack`.
    """
    if compiles(config, target.dtype, target.device):
        return CompiledStack.published(config, weights, target.block_size, block_layers)
    return TorchStack(config, weights, block_layers)


def layer_of(name: str, decoder: Any, target: LM) -> CompiledStack | TransformersLayer:
    """The layer of a decoder of transformers that has one, which is left without what compiled code takes.

    Args:
        name: of the target, for messages.
        decoder: as `decoder_of_one_layer` makes it.
        target: the loaded target, in whose dtype and blocks it computes.

    Raises:
        UsageError: it does not run.
    """
    family = compiled_family(decoder)
    if family is not None:
        return CompiledStack.of_decoder(decoder, family, target.block_size)
    from specdec_cli.lm.heads.transformers_layer import TransformersLayer  # transformers' models take seconds to import

    return TransformersLayer(name, decoder, kind_for(target.dtype, target.device))


def product_of(weights: MutableMapping[str, Tensor], name: str) -> Callable[[Tensor], Tensor]:
    """The product with one of a head's weights `name.weight` and its bias, which leaves its shape.

    Args:
        weights: of the head.
        name: of the product.

    Returns:
        A function of x [n, in] to [n, out], float32 or in x's dtype.
    """
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    weights[f"{name}.weight"] = weight.to("meta")
    if multiplies(weight.dtype, weight.device):
        return CompiledProduct(weight, bias)
    return pack(weight, bias, kind_for(weight.dtype, weight.device))


def compiles(config: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether compiled code runs the layers of a head's configuration."""
    obstacle = config_obstacle(config, FAMILIES["LlamaForCausalLM"], dtype, device)
    is_known = obstacle is None and config.rope_parameters.get("rope_type") != _LONG_ROPE
    return is_known and native.missing() is None


def compiled_family(decoder: Any) -> Family | None:
    """The family of a decoder of transformers with one layer, if compiled code runs that; None if not."""
    layer, dtype = decoder.layers[0], decoder.dtype
    family = family_of_layer(layer)
    if family is None or family.has_multipliers or family.adds_one:  # models of these scale what they are fed
        return None
    obstacle = config_obstacle(decoder.config, family, dtype, decoder.device) or unknown_module(layer, dtype)
    return family if (obstacle or native.missing()) is None else None


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether compiled code multiplies with weights of a dtype on a device."""
    return device.type == "cpu" and dtype in DTYPES and native.missing() is None
