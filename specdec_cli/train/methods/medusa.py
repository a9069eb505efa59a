"""Training of Medusa heads (Cai et al. 2024, arXiv 2401.10774) on a frozen target, "Medusa-1", in the authors' format.

Head i reads the target's final hidden state at position t and predicts the token at t + 2 + i. The loss is the sum over
heads. A head begins as the target's output layer behind a residual block that changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.lm.door import Tap
from specdec_cli.train.method import BatchLoss, DraftModule, TrainingMethod
from specdec_cli.train.published import write_draft
from specdec_cli.train.samples import TrainingBatch
from specdec_cli.train.weights import NamedModule, matched

_DEFAULT_DEPTH = 5
_FILE = "medusa_lm_head.safetensors"


class MedusaTraining(TrainingMethod):
    """Trains Medusa heads with one residual block each."""

    name: ClassVar[str] = "medusa"
    drafts_with: ClassVar[str | None] = "medusa"

    @property
    def taps(self) -> Sequence[Tap]:
        """The states behind the target's final norm."""
        return ("final",)

    @property
    def depth(self) -> int:
        """Heads."""
        return self.settings.depth or _DEFAULT_DEPTH

    def build(self) -> MedusaModule:
        """Residual blocks of zeros, and the target's output layer for each head."""
        size = self.target.hidden_size
        weights: dict[str, Tensor] = {}
        for i in range(self.depth):
            weights |= {f"{i}.0.linear.weight": torch.zeros(size, size), f"{i}.0.linear.bias": torch.zeros(size)}
            weights[f"{i}.1.weight"] = self.target.output_layer()
        weights = {name: weight.to(self.target.device) for name, weight in weights.items()}
        return MedusaModule(weights, self.depth, self.loss)

    def save(self, module: DraftModule, folder: Path) -> None:
        """Write the authors' names, with the keys that vLLM (up to 0.32) reads beside theirs."""
        assert isinstance(module, MedusaModule), "a method saves what it has built"
        content = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "base_model_name_or_path": self.target.lm.name,
            "medusa_num_heads": self.depth,
            "medusa_num_layers": 1,
            "medusa_fc_bias": True,
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.lm.vocab_size,
        }
        write_draft(folder, content, module.tensors(), _FILE)


class MedusaModule(NamedModule):
    """The heads and their loss."""

    def __init__(self, weights: dict[str, Tensor], depth: int, loss: str) -> None:
        super().__init__(weights, loss)
        self._depth = depth

    def forward(self, batch: TrainingBatch) -> BatchLoss:
        """Sum over heads of the mean loss over the answers' tokens that each predicts behind an answer's token."""
        assert batch.features is not None, "the batch brings the final states"
        total, losses = batch.logits.new_zeros(()), []
        for head in range(self._depth):
            samples, places = self._rows(batch, head)
            q = self._logits(batch.features[samples, places, 0], head).float().log_softmax(-1)
            p = batch.logits[samples, places + head + 1].log_softmax(-1)
            total = total + self.loss(q, p)
            losses.append(matched(q.detach(), p, torch.zeros_like(places), 1))
        return BatchLoss(total, torch.cat([matches for matches, _ in losses]), torch.cat([num for _, num in losses]))

    def _rows(self, batch: TrainingBatch, head: int) -> tuple[Tensor, Tensor]:
        """Samples and positions t [n] with an answer's tokens at t + 1, where a draft begins, and at t + 2 + head."""
        answers, shift = batch.answers[:, 1:], head + 1
        begins = answers[:, : max(answers.shape[1] - shift, 0)]
        samples, places = ((begins > 0) & (begins == answers[:, shift:])).nonzero(as_tuple=True)
        return samples, places

    def _logits(self, states: Tensor, head: int) -> Tensor:
        weight, bias = (self.weights[f"{head}.0.linear.{part}"] for part in ("weight", "bias"))
        hidden = states + functional.silu(functional.linear(states, weight, bias))
        return functional.linear(hidden, self.weights[f"{head}.1.weight"])
