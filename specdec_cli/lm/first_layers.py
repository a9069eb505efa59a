"""A transformers model's first layers with its final norm and its output layer, as a model of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from specdec_cli.lm.forward.taps import decoder_layers
from specdec_cli.lm.kernels.packing import Weight


def first_layers(model: Any, num_layers: int | None) -> Any:
    """A causal LM with the first layers of another; None is all.

    Only the modules that hold the list of layers are new: weights, layers and whatever they carry are shared.
    """
    if num_layers is None:
        return model
    layers = decoder_layers(model)
    made = _with_child(model, layers, nn.ModuleList(list(layers)[:num_layers]))
    config = copy.deepcopy(model.config)
    config.get_text_config().num_hidden_layers = num_layers
    made.config = config
    return made


def weights_of_first_layers(weights: Sequence[Weight], model: Any, num_layers: int | None) -> list[Weight]:
    """The weights that are left of a model's."""
    if num_layers is None:
        return list(weights)
    layers = decoder_layers(model)
    prefix = next(name for name, module in model.named_modules() if module is layers)
    gone = tuple(f"{prefix}.{i}." for i in range(num_layers, len(layers)))
    return [weight for weight in weights if not weight.name.startswith(gone)]


def added_bytes(weights: Sequence[Weight], shared: Sequence[Weight]) -> int:
    """Memory for weights beside those that a model shares with another: what is as large there is the same memory."""
    known = {(weight.name, weight.num_bytes) for weight in shared}
    return sum(weight.num_bytes for weight in weights if (weight.name, weight.num_bytes) not in known)


def _with_child(module: nn.Module, old: nn.Module, new: nn.Module) -> Any:
    """A module with another one in the place of one inside it."""
    if module is old:
        return new
    name, child = next(
        (name, child) for name, child in module.named_children() if any(it is old for it in child.modules())
    )
    made = copy.copy(module)
    made._modules = {**module._modules, name: _with_child(child, old, new)}
    return made
