"""Training of DFlash2 drafts in z-lab's format: DFlash's loss, and that of the selector.

The selector's loss is the cross-entropy of its scores over a row's candidates, behind the text's own tokens. Its label
is the target's likeliest token, which takes the last candidate's place where it is none. As in the speculators library,
the draft begins as DFlash: convolutions pass their rows on, and the selector adds next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config

from specdec_cli.lm.heads.dflash2 import SUBLAYERS, ConvolvedLayer, convolved, pair_scores
from specdec_cli.lm.heads.head_layer import HeadLayer
from specdec_cli.train.method import BatchLoss
from specdec_cli.train.methods.dflash import DFlashModule, DFlashTraining, PredictedRows
from specdec_cli.train.weights import mean_by_depth

_NUM_TAPS, _GROUP, _RANK, _CANDIDATES = 2, 16, 256, 16
_SPREAD = 0.02  # of the selector's first weights


class DFlash2Training(DFlashTraining):
    """Trains a DFlash2 draft; settings are DFlash's, and rows fill in the token at their own place."""

    name: ClassVar[str] = "dflash2"
    kind: ClassVar[str] = "DFlash2"
    own_settings: ClassVar[frozenset[str]] = DFlashTraining.own_settings - {"sample_from_anchor"}

    @property
    def group_size(self) -> int:
        """Channels that share weights of a convolution."""
        return gcd(_GROUP, self.target.hidden_size)

    @property
    def rank(self) -> int:
        """Of the selector."""
        return min(_RANK, self.target.hidden_size)

    @property
    def num_candidates(self) -> int:
        """Tokens that the selector chooses from."""
        return min(_CANDIDATES, self.target.lm.vocab_size)

    def module_type(self) -> type[DFlashModule]:
        """The class of the network."""
        return DFlash2Module

    def first_weights(self, config: Qwen3Config) -> dict[str, Tensor]:
        """DFlash's, convolutions that pass their rows on, and a small random selector."""
        weights, size = super().first_weights(config), self.target.hidden_size
        num = 2 * _NUM_TAPS * size // self.group_size
        for start in (f"layers.{i}.{sublayer}_conv" for i in range(self.num_layers) for sublayer in SUBLAYERS):
            weights[f"{start}.base_kernel"] = torch.tensor([1.0, 0.0])[None, :, None].expand(2, -1, size)
            weights[f"{start}.kernel_projection.weight"] = torch.zeros(num, size)
        shapes = {f"{side}_codebook": (self.target.lm.vocab_size, self.rank) for side in ("predecessor", "successor")}
        shapes["hidden_projection.weight"] = (self.rank, size)
        return weights | {f"candidate_selector.{name}": _SPREAD * torch.randn(shape) for name, shape in shapes.items()}

    def format_keys(self) -> dict[str, Any]:
        """Z-lab's, with the sizes of convolutions and selector."""
        return {
            "architectures": ["DFlash2DraftModel"],
            "is_causal": False,
            "dflash_config": {
                **self.shared_keys,
                "block_size": self.block_size,
                "conv_kernel_size": _NUM_TAPS,
                "conv_group_size": self.group_size,
                "selector_rank": self.rank,
                "selector_top_k": self.num_candidates,
            },
        }


class DFlash2Module(DFlashModule):
    """The draft and the loss of its blocks; arguments are `DFlashModule`'s, of a `DFlash2Training`."""

    layer_type: ClassVar[type[HeadLayer]] = ConvolvedLayer

    def __init__(
        self,
        config: Qwen3Config,
        weights: dict[str, Tensor],
        embedding: Tensor,
        output_layer: Tensor,
        method: DFlashTraining,
    ) -> None:
        super().__init__(config, weights, embedding, output_layer, method)
        assert isinstance(method, DFlash2Training), "a method builds its own network"
        self._num_candidates = method.num_candidates

    def run_layer(self, layer: HeadLayer, hidden: Tensor, inputs: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """As `DFlashModule.run_layer`, with convolutions around each sublayer."""
        assert isinstance(layer, ConvolvedLayer), "its layers are `layer_type`"
        weights = layer.kernels("attention", inputs)
        attended = attend(convolved(inputs, weights[:, 0], self._size))
        return layer.finish_convolved(hidden, attended, weights, self._size)

    def loss_of(self, rows: PredictedRows) -> BatchLoss:
        """DFlash's loss of the logits, and the selector's."""
        labels = rows.p.argmax(-1, keepdim=True)
        candidates = rows.logits.detach().topk(self._num_candidates, -1).indices
        is_candidate = (candidates == labels).any(-1, keepdim=True)
        candidates = torch.where(is_candidate, candidates, torch.cat([candidates[:, :-1], labels], -1))
        names = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        selector = (self.weights[f"candidate_selector.{name}"] for name in names)
        scores = rows.logits.gather(1, candidates) + pair_scores(rows.states, rows.before, candidates, *selector)
        places = (candidates == labels).int().argmax(-1)
        losses, q = functional.cross_entropy(scores, places, reduction="none"), rows.logits.log_softmax(-1)
        weights = self.row_weights(rows, q)
        value = self.loss(q, rows.p, weights) + self.loss.mean(losses, weights)
        is_match = is_candidate[:, 0] & (scores.argmax(-1) == places)
        return BatchLoss(value, *mean_by_depth(is_match.float(), rows.depths, self._depth))
