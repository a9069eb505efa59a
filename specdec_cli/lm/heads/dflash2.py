"""DFlash2 drafts: DFlash drafts with short convolutions around every sublayer, and a selector of the tokens' path.

A convolution gives each of a block's rows a weighted sum of itself and of the rows right before it, none beyond the
block. Its weights are a table's and, shared by the channels of a group, a product of the sublayer's normalized input.

The selector takes the k candidates with the largest logits of a row. Candidate b behind token a scores its logit plus
the sum over r of A[a]_r (W h)_r B[b]_r, where h is the row's state. No other token is drafted.

Sources: z-lab/dflash (`dflash/model.py`), the speculators library (`models/dflash2`) and vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.errors import UsageError
from specdec_cli.lm.files.draft_formats import DraftFolder
from specdec_cli.lm.heads.dflash import BlockHead, DFlashDraft, read_block
from specdec_cli.lm.heads.draft_sequences import Ahead, RecordedAhead
from specdec_cli.lm.heads.head_layer import HeadLayer, LayerFeed
from specdec_cli.lm.heads.head_sequences import HeadSequences
from specdec_cli.lm.heads.layer_stack import BlockLayer, LayerStack, TorchStack
from specdec_cli.lm.heads.published import AGAIN, NONE_ELSE
from specdec_cli.quantities import counted
from specdec_cli.transfer import sent

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM

SUBLAYERS = ("attention", "mlp")
_SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
"""Keys of a configuration, and what they are without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Draft(DFlashDraft):
    """A DFlash2 draft by its folder.

    Args:
        num_taps_back: rows that a convolution reads, its own among them.
        group_size: channels that share weights.
        rank: of the selector.
        num_candidates: of each row.
    """

    num_taps_back: int
    group_size: int
    rank: int
    num_candidates: int

    @property
    def parts(self) -> list[str]:
        """Its convolutions and its selector."""
        return [
            f"convolutions over {counted(self.num_taps_back, 'row')}",
            f"a selector among {self.num_candidates} candidates",
        ]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of DFlash's tensors, the convolutions and the selector."""
        shapes, size = DFlashDraft.shapes(self), int(self.layer.hidden_size)
        for i in range(len(self.block_layers)):
            for sublayer in SUBLAYERS:
                start = f"layers.{i}.{sublayer}_conv"
                shapes[f"{start}.base_kernel"] = (2, self.num_taps_back, size)
                num = 2 * self.num_taps_back * (size // self.group_size)
                shapes[f"{start}.kernel_projection.weight"] = (num, size)
        for side in ("predecessor", "successor"):
            shapes[f"candidate_selector.{side}_codebook"] = (self.vocab_size or 0, self.rank)
        return shapes | {"candidate_selector.hidden_projection.weight": (self.rank, size)}

    @staticmethod
    def common_name(name: str) -> str:
        """As z-lab's folders have it: a codebook is no weight of a layer."""
        name = DFlashDraft.common_name(name)
        return name.removesuffix(".weight") if name.endswith("_codebook.weight") else name


def read(name: str, source: DraftFolder) -> DFlash2Draft:
    """The DFlash2 draft in a folder.

    Raises:
        UsageError: a variant that is not supported.
        RunError: its configuration cannot be read.
    """

    def parts(keys: Mapping[str, Any]) -> dict[str, Any]:
        sizes = {key: source.whole_number(keys, key, 1) or usual for key, usual in _SIZES.items()}
        num_taps_back, group_size, rank, num_candidates = sizes.values()
        return {"num_taps_back": num_taps_back, "group_size": group_size, "rank": rank,
                "num_candidates": num_candidates}  # fmt: skip

    draft = read_block(DFlash2Draft, name, source, parts)
    size = int(draft.layer.hidden_size)
    if size % draft.group_size:
        message = f"`conv_group_size` of `{name}` is `{draft.group_size}`, and its hidden states have {size} channels"
        raise UsageError(message, AGAIN)
    if draft.is_reduced:
        message = f"the DFlash2 draft `{name}` drafts {draft.draft_vocab_size} of {draft.vocab_size} tokens"
        raise UsageError(f"{message}, which is not supported", NONE_ELSE)
    return draft


class ConvolvedLayer(HeadLayer):
    """A decoder layer with convolutions around its attention and its feed-forward layer."""

    def run(self, residual: Tensor, inputs: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """As `HeadLayer.run`; every sequence has as many new slots, its block."""
        num_rows = feeds[0].num_each
        weights = self.kernels("attention", inputs)
        attended = self._attend(convolved(inputs, weights[:, 0], num_rows), positions, feeds)
        return self.finish_convolved(residual, attended, weights, num_rows)

    def finish_convolved(self, residual: Tensor, attended: Tensor, weights: Tensor, num_rows: int) -> Tensor:
        """The layer's output [n, hidden] of what attention found before its projection.

        Args:
            residual: [n, hidden].
            attended: [n, heads * head size].
            weights: of the convolutions around attention, as `kernels` gives them.
            num_rows: of a block.
        """
        projected = self._linear(attended, "self_attn.o_proj")
        hidden = residual + convolved(projected, weights[:, 1], num_rows)
        inputs = self.norm(hidden, self._weights["post_attention_layernorm.weight"])
        weights = self.kernels("mlp", inputs)
        found = self._mlp(convolved(inputs, weights[:, 0], num_rows))
        return hidden + convolved(found, weights[:, 1], num_rows)

    def kernels(self, sublayer: str, inputs: Tensor) -> Tensor:
        """Weights [n, 2 sides, taps, hidden] of the convolutions before and behind a sublayer.

        Args:
            sublayer: of `SUBLAYERS`.
            inputs: of the sublayer, normalized [n, hidden].
        """
        base = self._weights[f"{sublayer}_conv.base_kernel"]
        own = self._linear(inputs, f"{sublayer}_conv.kernel_projection").view(len(inputs), *base.shape[:2], -1)
        return base + own.repeat_interleave(base.shape[-1] // own.shape[-1], -1)


def convolved(rows: Tensor, weights: Tensor, num_rows: int) -> Tensor:
    """Each row's weighted sum [n, hidden] of itself and of those before it in its block.

    Args:
        rows: of blocks, one behind the other [n, hidden].
        weights: of each row, its own place first [n, taps, hidden].
        num_rows: of a block.
    """
    blocks, num_taps = rows.view(-1, num_rows, rows.shape[-1]), weights.shape[1]
    padded = functional.pad(blocks, (0, 0, num_taps - 1, 0))
    shifted = [padded[:, num_taps - 1 - tap : num_taps - 1 - tap + num_rows] for tap in range(num_taps)]
    return (torch.stack(shifted, 2).flatten(0, 1) * weights).sum(1)


class DFlash2Head(BlockHead):
    """A DFlash2 draft: a row drafts its candidates alone, by their scores behind the token before it."""

    draft: DFlash2Draft
    records_trees = False

    def stack(
        self, layer: Any, weights: dict[str, Tensor], target: LM, block_layers: Sequence[BlockLayer] | None
    ) -> LayerStack:
        """Layers with convolutions, in torch's operators."""
        return TorchStack(layer, weights, block_layers, ConvolvedLayer)

    def given(self, logits: list[Tensor], states: list[Tensor]) -> Ahead:
        """Logits that `behind` selects from."""
        return Ahead(logits, states, self.behind)

    def behind(self, logits: Tensor, states: Sequence[Tensor], before: Sequence[Sequence[int]]) -> Tensor:
        """Scores [n, V] float32 of rows' candidates behind given tokens, -inf of all others."""
        own, tokens = torch.stack([its[-1] for its in states]), [its[-1] for its in before]
        return self._selected(logits, own, sent(tokens, torch.int64, logits.device))

    def recorded(self, logits: Tensor, states: Tensor) -> RecordedAhead:
        """Logits that are selected from behind the token before."""
        return RecordedAhead(
            logits, lambda depth, before: self._selected(logits[:, depth], states[:, depth], before[:, -1])
        )

    def _selected(self, logits: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
        """Scores [n, V] of the candidates of rows with states [n, hidden] behind tokens [n]."""
        names = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        scores, candidates = path_scores(
            logits, states, tokens, self.draft.num_candidates,
            *(self.weights[f"candidate_selector.{name}"] for name in names),
        )  # fmt: skip
        return torch.full_like(logits, -torch.inf).scatter_(1, candidates, scores)


def path_scores(
    logits: Tensor, states: Tensor, tokens: Tensor, num: int, before: Tensor, behind: Tensor, projection: Tensor
) -> tuple[Tensor, Tensor]:
    """Scores [n, num] float32 of rows' candidates, and their ids.

    Args:
        logits: of rows [n, V] float32.
        states: of rows [n, hidden].
        tokens: before each row [n] int64.
        num: candidates of a row.
        before: codebook A [V, rank] of the tokens before.
        behind: codebook B [V, rank] of candidates.
        projection: W [rank, hidden].
    """
    unary, candidates = logits.topk(min(num, logits.shape[1]), -1)
    return unary + pair_scores(states, tokens, candidates, before, behind, projection), candidates


def pair_scores(
    states: Tensor, tokens: Tensor, candidates: Tensor, before: Tensor, behind: Tensor, projection: Tensor
) -> Tensor:
    """The share [n, candidates] float32 of the token before a row in its candidates' scores; see `path_scores`."""
    latent = functional.embedding(tokens, before) * functional.linear(states, projection)
    return (functional.embedding(candidates, behind) @ latent[..., None])[..., 0].float()


def sequences(draft: DFlash2Draft, target: LM, _num_tokens: int) -> HeadSequences:
    """The draft's sequences, its weights loaded."""
    return HeadSequences([DFlash2Head(draft, target)], target, draft.name, draft.num_taps)
