"""EAGLE heads (Li et al. 2024, arXiv 2401.15077; EAGLE-3: 2503.01840): one decoder layer on the target's hidden states.

Slot t pairs the hidden states of position t with the token at position t + 1, and predicts the token at t + 2. The
first drafted token follows from the target's own states; each further one from the head's own output in their stead.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.lm.files.lengths import follows_length
from specdec_cli.lm.heads.draft_vocabulary import spread, target_ids
from specdec_cli.lm.heads.eagle_files import HeadConfig
from specdec_cli.lm.heads.head import Head
from specdec_cli.lm.heads.head_layer import LayerFeed
from specdec_cli.lm.heads.head_shapes import check_shapes
from specdec_cli.lm.heads.head_tensors import read_head_tensors
from specdec_cli.lm.heads.stacks import product_of, stack_of

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
        self.layers = stack_of(config.layer, weights, target)
        super().__init__(target, weights, self.layers.key_shape, self.layers.key_shape)
        self._config, self._join = config, product_of(weights, "fc")
        if follows_length(config.layer):
            self.recording_obstacle = "its rotary positions depend on the context's length"

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Input embeddings [n, hidden] by its own table, or the target's where it has none."""
        table = self.weights.get("embed_tokens.weight")
        if table is None:
            return super().embed(tokens)
        return functional.embedding(torch.as_tensor(tokens, dtype=torch.long, device=table.device), table)

    def run(self, embedded: Tensor, feature: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """The last layer's output, before any norm."""
        residual, inputs = self.combine(embedded, feature)
        return self.layers.run(residual, positions, feeds, inputs)

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
        self._ids = target_ids(config, self.weights, target.name, target.vocab_size)
        self._head = product_of(self.weights, "lm_head") if "lm_head.weight" in self.weights else None

    def mix(self, features: Tensor) -> Tensor:
        """fc of the joined states."""
        if self._config.fc_norm:
            norms = [self.weights[f"fc_norm.{i}.weight"] for i in range(features.shape[1])]
            features = torch.stack([self.layers.norm(features[:, i], norm) for i, norm in enumerate(norms)], 1)
        joined = features.flatten(1)
        if self._config.norm_before_fc:
            joined = self.layers.norm(joined, self.weights["input_norm.weight"])
        return self._join(joined).to(joined.dtype)

    def combine(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """The feature, normalized or not, and both normalized side by side."""
        normalized = self.layers.norm(feature, self.weights["layers.0.hidden_norm.weight"])
        token = self.layers.norm(embedded, self.weights["layers.0.input_layernorm.weight"])
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
        return self.layers.norm(output, self.weights["norm.weight"])
