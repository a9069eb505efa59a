"""The decoder layers of drafts that have several, and their keys and values side by side in one cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.heads.head_layer import HeadLayer, LayerFeed


class LayerStack:
    """Layers, each of which normalizes what its attention reads.

    Args:
        config: a transformers configuration of a Llama or a Qwen 3 model; it says how many layers there are.
        weights: named as in published folders: `layers.0.…`, `layers.1.…`.

    Attributes:
        key_shape: key heads of all layers, and numbers in each; the same of values.
    """

    def __init__(self, config: Any, weights: Mapping[str, Tensor]) -> None:
        self._layers = [HeadLayer(config, _of_layer(weights, i)) for i in range(int(config.num_hidden_layers))]
        self._norms = [weights[f"layers.{i}.input_layernorm.weight"] for i in range(len(self._layers))]
        first = self._layers[0]
        self.key_shape = (len(self._layers) * first.num_kv_heads, first.head_size)

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension, computed in float32."""
        return self._layers[0].norm(hidden, weight)

    def run(
        self,
        hidden: Tensor,
        positions: Tensor,
        feeds: list[LayerFeed],
        visible: Callable[[int, LayerFeed], Tensor | None] | None = None,
    ) -> Tensor:
        """The last layer's output [n, hidden] of new slots, sequence after sequence.

        Args:
            hidden: what the first layer reads [n, hidden].
            positions: [n] int64, for the rotary embedding.
            feeds: the sequences, with the keys and values of all layers.
            visible: of a layer's number and a sequence, the places that its new slots attend to; None has each attend
                to those before it.
        """
        for i, layer in enumerate(self._layers):
            its = [feed.of_layer(i, len(self._layers)) for feed in feeds]
            if visible is not None:
                its = [replace(feed, visible=visible(i, feed)) for feed in its]
            hidden = layer.run(hidden, layer.norm(hidden, self._norms[i]), positions, its)
        return hidden

    def remember(self, inputs: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> None:
        """File keys and values of the same inputs [n, hidden] in every layer; they are not normalized."""
        for i, layer in enumerate(self._layers):
            layer.remember(inputs, positions, [feed.of_layer(i, len(self._layers)) for feed in feeds])


def positions_of(feeds: list[LayerFeed], device: torch.device) -> Tensor:
    """The positions [n] int64 of all new slots, where slots and positions are the same."""
    return torch.cat([torch.arange(feed.places[0], feed.places[0] + len(feed.places), device=device) for feed in feeds])


def _of_layer(weights: Mapping[str, Tensor], i: int) -> dict[str, Tensor]:
    start = f"layers.{i}."
    return {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}
