"""Networks whose parameters have the names of their published folder, and the decoder layers that several share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specdec_cli.lm.heads.head_layer import HeadLayer
from specdec_cli.train.method import DraftModule


class NamedModule(DraftModule):
    """A draft whose parameters go by published names.

    Args:
        weights: first values [any shape] float32 by name; they are copied.
        loss: its name.

    Attributes:
        weights: the parameters by name.
    """

    def __init__(self, weights: Mapping[str, Tensor], loss: str) -> None:
        super().__init__(loss)
        self.weights = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
        for name, weight in self.weights.items():
            self.register_parameter(name.replace(".", "/"), weight)

    def tensors(self) -> dict[str, Tensor]:
        """Values by name, without gradient."""
        return {name: weight.detach() for name, weight in self.weights.items()}


def first_layer_weights(config: Any, num_layers: int) -> dict[str, Tensor]:
    """First weights of decoder layers, `layers.0.…` and on: random projections scaled by their inputs' width, norms 1.

    Args:
        config: transformers configuration of a Llama or a Qwen 3 model.
        num_layers: how many layers.
    """
    size = int(config.hidden_size)
    shapes = HeadLayer.shapes(config, size) | {"input_layernorm.weight": (size,)}
    return {
        f"layers.{i}.{name}": torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * shape[1] ** -0.5
        for i in range(num_layers)
        for name, shape in shapes.items()
    }


def matched(q: Tensor, p: Tensor, depths: Tensor, num_depths: int) -> tuple[Tensor, Tensor]:
    """How often the draft's most likely token is the target's, by depth.

    Args:
        q: the draft's logits or log-probabilities [n, V].
        p: the target's [n, V].
        depths: [n] int64, each row's, from 0.
        num_depths: how many there are.

    Returns:
        Shares [depths] float32, 0 where nothing was counted, and how many rows were counted [depths] float32.
    """
    return mean_by_depth((q.argmax(-1) == p.argmax(-1)).float(), depths, num_depths)


def mean_by_depth(values: Tensor, depths: Tensor, num_depths: int) -> tuple[Tensor, Tensor]:
    """Means of values [n] float32 by depth and how many each has, both [depths] float32; see `matched`."""
    num = torch.zeros(num_depths, device=values.device).index_add_(0, depths, torch.ones_like(values))
    total = torch.zeros(num_depths, device=values.device).index_add_(0, depths, values)
    return total / num.clamp(min=1), num
