"""EAGLE heads (Li et al. 2024, arXiv 2401.15077; EAGLE-3: 2503.01840): one decoder layer on the target's hidden states.

Slot t pairs the hidden states of position t with the token at position t + 1, and predicts the token at t + 2. The
first drafted token follows from the target's own states; each further one from the head's own output in their stead.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.lm.heads.compiled_layer import CompiledLayer, CompiledProduct, compiles
from specdec_cli.lm.heads.draft_vocabulary import spread, target_ids
from specdec_cli.lm.heads.eagle_files import HeadConfig
from specdec_cli.lm.heads.head import Head
from specdec_cli.lm.heads.head_layer import HeadLayer, LayerFeed
from specdec_cli.lm.heads.head_shapes import check_shapes
from specdec_cli.lm.heads.head_tensors import read_head_tensors
from specdec_cli.lm.kernels.linear import PlainLinear

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM

_HINT = "choose a draft that was made for this target"


class _LayerHead(Head):
    """Base of EAGLE heads: layers of their own, mostly one, and what stands before and behind them.

    Args:
        config: of the head.
        target: the loaded target, in whose dtype the head computes.

    Raises:
        RunError: weights that cannot be read.
        UsageError: weights that are missing or of other shapes, or a head for another target.
    """

    def __init__(self, config: HeadConfig, target: LM) -> None:
        config.check_fits(target.name, target.embed([0]).shape[-1], target.vocab_size)
        weights = read_head_tensors(config, target.dtype, target.device)
        check_shapes(config, {name: tuple(value.shape) for name, value in weights.items()})
        self._is_compiled = compiles(config.layer, target.dtype, target.device)
        its = [_of_layer(weights, i) for i in range(config.num_layers)]
        if self._is_compiled and config.num_layers == 1:
            layers: list[HeadLayer] = [CompiledLayer(config.layer, its[0], target.block_size)]
        else:
            layers = [HeadLayer(config.layer, one) for one in its]
        self.layer, *self._more = layers
        weights |= {f"layers.{i}.{name}": value for i, one in enumerate(its) for name, value in one.items()}
        shape = (config.num_layers * self.layer.num_kv_heads, self.layer.head_size)
        super().__init__(target, weights, shape, shape)
        self._config, self._join = config, self.product("fc")

    def product(self, name: str) -> Callable[[Tensor], Tensor]:
        """The product with one of the weights, which leaves its shape where compiled code takes it."""
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        if not self._is_compiled:
            return PlainLinear(weight, bias)
        self.weights[f"{name}.weight"] = weight.to("meta")
        return CompiledProduct(weight, bias)

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Input embeddings [n, hidden] by its own table, or the target's where it has none."""
        table = self.weights.get("embed_tokens.weight")
        if table is None:
            return super().embed(tokens)
        return functional.embedding(torch.tensor(tokens, dtype=torch.long, device=table.device), table)

    def run(self, embedded: Tensor, feature: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """The last layer's output, before any norm."""
        residual, inputs = self.combine(embedded, feature)
        if not self._more:
            return self.layer.run(residual, inputs, positions, feeds)
        num = 1 + len(self._more)
        output = self.layer.run(residual, inputs, positions, [feed.of_layer(0, num) for feed in feeds])
        for i, layer in enumerate(self._more, 1):
            inputs = layer.norm(output, self.weights[f"layers.{i}.input_layernorm.weight"])
            output = layer.run(output, inputs, positions, [feed.of_layer(i, num) for feed in feeds])
        return output

    @abstractmethod
    def combine(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """The residual [n, hidden] behind attention, and what attention reads [n, width]."""


class EagleHead(_LayerHead):
    """EAGLE 1 and 2: u = fc([embedding; feature]); no norm before attention; the target's output layer."""

    def combine(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """U twice."""
        joined = torch.cat([embedded, feature], -1)
        found = self._join(joined).to(joined.dtype)
        return found, found

    def recycled(self, output: Tensor) -> Tensor:
        """The output stands for the target's final state."""
        return output

    def logits(self, output: Tensor) -> Tensor:
        """The target's output layer of the output."""
        return self._target.head(output)


class Eagle3Head(_LayerHead):
    """EAGLE-3: attention reads [norm(embedding); norm(feature)]; the feature joins several layers' states."""

    def __init__(self, config: HeadConfig, target: LM) -> None:
        super().__init__(config, target)
        is_reduced = config.draft_vocab_size != config.vocab_size
        self._ids = target_ids(config.name, self.weights.get("d2t") if is_reduced else None, target)
        self._head = self.product("lm_head") if "lm_head.weight" in self.weights else None

    def mix(self, features: Tensor) -> Tensor:
        """fc of the joined states."""
        if self._config.fc_norm:
            norms = [self.weights[f"fc_norm.{i}.weight"] for i in range(features.shape[1])]
            features = torch.stack([self.layer.norm(features[:, i], norm) for i, norm in enumerate(norms)], 1)
        joined = features.flatten(1)
        if self._config.norm_before_fc:
            joined = self.layer.norm(joined, self.weights["input_norm.weight"])
        return self._join(joined).to(joined.dtype)

    def combine(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """The feature, normalized or not, and both normalized side by side."""
        normalized = self.layer.norm(feature, self.weights["layers.0.hidden_norm.weight"])
        token = self.layer.norm(embedded, self.weights["layers.0.input_layernorm.weight"])
        residual = normalized if self._config.norm_before_residual else feature
        return residual, torch.cat([token, normalized], -1)

    def recycled(self, output: Tensor) -> Tensor:
        """The output before its norm; behind it in EAGLE-3.1 (`norm_output`)."""
        return self._norm(output) if self._config.norm_output else output

    def logits(self, output: Tensor) -> Tensor:
        """Its own output layer, spread over the target's vocabulary."""
        normalized = self._norm(output)
        if self._head is None:
            return self._target.head(normalized)
        return spread(self._head(normalized).float(), self._ids, self.vocab_size)

    def _norm(self, output: Tensor) -> Tensor:
        return self.layer.norm(output, self.weights["norm.weight"])


def _of_layer(weights: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    start = f"layers.{index}."
    return {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}
