"""Training of DSpark drafts (arXiv 2607.05147) in DeepSpec's format: a Markov head and a confidence head.

Row i weighs exp(-i / 4), in the confidence's loss whatever `position_weights` says. Its loss is that of its
distribution behind the text's own tokens, by default 0.1 CE + 0.9 sum |q - p|, plus the binary cross-entropy of its
confidence with the acceptance rate 1 - sum |q - p| / 2.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config

from specdec_cli.train.losses import total_variation
from specdec_cli.train.method import BatchLoss
from specdec_cli.train.methods.dflash import DFlashModule, DFlashTraining, PredictedRows
from specdec_cli.train.weights import matched

_RANK, _DECAY = 256, 4.0


class DSparkTraining(DFlashTraining):
    """Trains a DSpark draft with a Markov head of the type `vanilla`; settings are DFlash's."""

    name: ClassVar[str] = "dspark"
    kind: ClassVar[str] = "DSpark"
    usual_loss: ClassVar[str] = "ce-tv"
    has_confidence: ClassVar[bool] = True
    own_settings: ClassVar[frozenset[str]] = DFlashTraining.own_settings - {"sample_from_anchor"}

    @property
    def from_anchor(self) -> bool:
        """Always."""
        return True

    @property
    def rank(self) -> int:
        """Of the Markov head."""
        return min(_RANK, self.target.hidden_size)

    @property
    def loss_decay(self) -> float:
        """4, however long a block is."""
        return _DECAY

    def module_type(self) -> type[DFlashModule]:
        """The class of the network."""
        return DSparkModule

    def first_weights(self, config: Qwen3Config) -> dict[str, Tensor]:
        """DFlash's, a Markov head that adds nothing, and a confidence of one half."""
        size, vocab_size = self.target.hidden_size, self.target.lm.vocab_size
        return super().first_weights(config) | {
            "markov_head.markov_w1.weight": torch.randn(vocab_size, self.rank) * self.rank**-0.5,
            "markov_head.markov_w2.weight": torch.zeros(vocab_size, self.rank),
            "confidence_head.proj.weight": torch.zeros(1, size + self.rank),
            "confidence_head.proj.bias": torch.zeros(1),
        }

    def format_keys(self) -> dict[str, Any]:
        """DeepSpec's."""
        return {
            **self.shared_keys,
            "architectures": ["Qwen3DSparkModel"],
            "block_size": self.block_size,
            "markov_rank": self.rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }


class DSparkModule(DFlashModule):
    """The draft and the loss of its blocks; arguments are `DFlashModule`'s."""

    def decays(self, rows: Tensor) -> Tensor:
        """Weights [n] of rows [n] int64 of their blocks; the first row gives a token, too."""
        return torch.exp(-rows / self._decay)

    def loss_of(self, rows: PredictedRows) -> BatchLoss:
        """The losses of the corrected distribution and of the confidence."""
        before = functional.embedding(rows.before, self.weights["markov_head.markov_w1.weight"])
        markov = functional.linear(before, self.weights["markov_head.markov_w2.weight"]).float()
        q = (rows.logits + markov).log_softmax(-1)
        confidence = functional.linear(
            torch.cat([rows.states, before], -1),
            self.weights["confidence_head.proj.weight"],
            self.weights["confidence_head.proj.bias"],
        )[:, 0].float()
        acceptance = 1 - total_variation(q.detach(), rows.p)
        losses = functional.binary_cross_entropy_with_logits(confidence, acceptance, reduction="none")
        value = self.loss(q, rows.p, self.row_weights(rows, q)) + self.loss.mean(losses, rows.decays)
        return BatchLoss(value, *matched(q.detach(), rows.p, rows.depths, self._depth))
