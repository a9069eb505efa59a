"""The decoder layers of a draft head, and their keys and values side by side in one cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.heads.head_layer import HeadLayer, LayerFeed, rms_norm


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """How one layer's rows attend to each other and to the context.

    Args:
        window: places before, itself included, that a row sees; None sees all.
        is_causal: rows see those before them alone.
    """

    window: int | None
    is_causal: bool

    def visible(self, feed: LayerFeed, device: torch.device) -> Tensor:
        """The places [new, end] bool that each of a sequence's new rows, neighbours, attends to."""
        behind, visible = feed.around(device)
        if self.is_causal:
            visible &= behind >= 0
        if self.window is not None:
            visible &= behind.abs() < self.window
        return visible


class LayerStack(ABC):
    """Decoder layers, each of which normalizes what its attention reads.

    Args:
        key_shape: key heads of all layers, and numbers in each.
        epsilon: of the norms.

    Attributes:
        key_shape: key heads of all layers, and numbers in each.
        value_shape: the same of values.
    """

    def __init__(self, key_shape: tuple[int, int], epsilon: float) -> None:
        self.key_shape, self.value_shape, self._epsilon = key_shape, key_shape, epsilon

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension, computed in float32."""
        return rms_norm(hidden, weight, self._epsilon)

    @abstractmethod
    def run(self, hidden: Tensor, positions: Tensor, feeds: list[LayerFeed], inputs: Tensor | None = None) -> Tensor:
        """The last layer's output [n, hidden] of new slots, sequence after sequence.

        Args:
            hidden: what the first layer's attention adds to [n, hidden].
            positions: [n] int64, for the rotary embedding.
            feeds: the sequences, with the keys and values of all layers.
            inputs: what the first layer's attention reads [n, width]; None has it read `hidden` through its norm.
        """

    @abstractmethod
    def remember(self, inputs: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> None:
        """File keys and values of the same inputs [n, hidden] in every layer; they are not normalized."""


class TorchStack(LayerStack):
    """Decoder layers in torch's operators.

    Args:
        config: a transformers configuration of a Llama or a Qwen 3 model.
        weights: those of the layers named as in published folders: `layers.0.…`, `layers.1.…`.
        block_layers: how each layer attends; None has each slot see what its feed says.
        layer: the class of each.
    """

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, Tensor],
        block_layers: Sequence[BlockLayer] | None = None,
        layer: type[HeadLayer] = HeadLayer,
    ) -> None:
        its = each_layer(weights)
        self._layers = [layer(config, layer_weights) for layer_weights in its]
        self._norms = [layer_weights.get("input_layernorm.weight") for layer_weights in its]
        self._block_layers, first = block_layers, self._layers[0]
        super().__init__((len(its) * first.num_kv_heads, first.head_size), first.epsilon)
        self.value_shape = (self.key_shape[0], first.value_size)

    def run(self, hidden: Tensor, positions: Tensor, feeds: list[LayerFeed], inputs: Tensor | None = None) -> Tensor:
        """As `LayerStack.run`."""
        for i, (layer, norm) in enumerate(zip(self._layers, self._norms, strict=True)):
            its = [feed.of_layer(i, len(self._layers)) for feed in feeds]
            if self._block_layers is not None:
                its = [replace(feed, visible=self._block_layers[i].visible(feed, hidden.device)) for feed in its]
            if i or inputs is None:
                assert norm is not None, "a layer that reads the one before it has a norm"
                inputs = self.norm(hidden, norm)
            hidden = layer.run(hidden, inputs, positions, its)
        return hidden

    def remember(self, inputs: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> None:
        """As `LayerStack.remember`."""
        for i, layer in enumerate(self._layers):
            layer.remember(inputs, positions, [feed.of_layer(i, len(self._layers)) for feed in feeds])


def positions_of(feeds: list[LayerFeed], device: torch.device) -> Tensor:
    """The positions [n] int64 of all new slots, where slots and positions are the same."""
    return torch.cat([torch.arange(feed.places[0], feed.places[0] + len(feed.places), device=device) for feed in feeds])


def each_layer(weights: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors of each layer in order, named without `layers.i.`."""
    layers: dict[int, dict[str, Tensor]] = {}
    for name, value in weights.items():
        start, _, rest = name.partition(".")
        if start == "layers":
            index, _, its = rest.partition(".")
            layers.setdefault(int(index), {})[its] = value
    return [layers[i] for i in sorted(layers)]
