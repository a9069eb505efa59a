"""Training of DFlash drafts (arXiv 2602.06036) in z-lab's format.

A block begins at an anchor, a token of an answer. Its first row reads the anchor's token, all others the mask token;
its rows see the target's joined states before the anchor and each other. Row i predicts the token at its own place, or,
where drafts sample from the anchor, the one behind it. The loss of row i weighs exp(-max(i - 1, 0) / γ), or
with `d-pace` (arXiv 2605.18810) about as many tokens as are accepted there and behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config

from specdec_cli.errors import UsageError
from specdec_cli.lm.door import Tap
from specdec_cli.lm.heads.dflash import default_layers
from specdec_cli.lm.heads.head_layer import HeadLayer
from specdec_cli.train.masks import check_mask_token, mask_token
from specdec_cli.train.method import BatchLoss, DraftModule, TrainingMethod
from specdec_cli.train.published import layer_content, write_draft
from specdec_cli.train.samples import Sample, TrainingBatch
from specdec_cli.train.weights import NamedModule, first_layer_weights, matched

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Train
    from specdec_cli.train.target import TrainingTarget

_DEFAULT_DEPTH, _MOST_LAYERS, _MOST_TAPS = 7, 5, 5
_LARGEST_DECAY = 7.0


class DFlashTraining(TrainingMethod):
    """Trains a DFlash draft of Qwen 3 layers with the target's embedding and output layer.

    Raises:
        UsageError: settings of other methods, a mask token that the target does not have, or a block of one row.
    """

    name: ClassVar[str] = "dflash"
    drafts_with: ClassVar[str | None] = "dflash"
    kind: ClassVar[str] = "DFlash"
    own_settings: ClassVar[frozenset[str]] = frozenset(
        {
            "layers",
            "num_layers",
            "intermediate_size",
            "num_anchors",
            "sample_from_anchor",
            "mask_token",
            "position_weights",
        }
    )

    def __init__(self, settings: Train, target: TrainingTarget) -> None:
        super().__init__(settings, target)
        check_mask_token(settings, target.lm.vocab_size)
        if self.block_size < 2:
            raise UsageError(f"a {self.kind} block of one row drafts nothing from masks", "train with a larger --depth")

    @property
    def taps(self) -> Sequence[Tap]:
        """The outputs of the layers that the settings name, or of up to five spread over the target's depth."""
        return self.settings.layers or _spread_layers(self.target.num_layers)

    @property
    def depth(self) -> int:
        """Tokens that a block gives."""
        return self.settings.depth or _DEFAULT_DEPTH

    @property
    def from_anchor(self) -> bool:
        """Whether a block's rows predict the token behind their own."""
        return self.settings.sample_from_anchor

    @property
    def block_size(self) -> int:
        """Rows of a block."""
        return self.depth if self.from_anchor else self.depth + 1

    @property
    def num_layers(self) -> int:
        """Decoder layers of the draft: by the settings, else a quarter of the target's, one to five."""
        return self.settings.num_layers or min(max(self.target.num_layers // 4, 1), _MOST_LAYERS)

    @property
    def rows_per_token(self) -> float:
        """A block at each token."""
        return float(self.block_size)

    def operations_per_token(self, num_trained: int) -> float:
        """Operations of the trained parameters, and of the target's output layer, which has no gradient of its own."""
        output_layer = 4.0 * self.target.lm.vocab_size * self.target.hidden_size
        return super().operations_per_token(num_trained) + output_layer * self.rows_per_token

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Choose the mask token."""
        self.mask_token = mask_token(samples, self.target.lm.vocab_size, self.settings)

    def build(self) -> DFlashModule:
        """Random layers; the first states are those of the anchor's token and of the mask."""
        torch.manual_seed(self.settings.seed)
        config = self._layer_config()
        weights = {name: weight.to(self.target.device) for name, weight in self.first_weights(config).items()}
        return self.module_type()(config, weights, self.target.embedding(), self.target.output_layer(), self)

    def module_type(self) -> type[DFlashModule]:
        """The class of the network."""
        return DFlashModule

    def first_weights(self, config: Qwen3Config) -> dict[str, Tensor]:
        """Values to begin with, by published names."""
        size, joined = self.target.hidden_size, len(self.taps) * self.target.hidden_size
        weights = first_layer_weights(config, self.num_layers)
        weights |= {"fc.weight": torch.randn(size, joined) * joined**-0.5}
        return weights | {"hidden_norm.weight": torch.ones(size), "norm.weight": torch.ones(size)}

    def save(self, module: DraftModule, folder: Path) -> None:
        """Write the authors' format, which has neither an embedding nor an output layer."""
        assert isinstance(module, DFlashModule), "a method saves what it has built"
        content = layer_content(self._layer_config(), self.num_layers) | {
            "num_target_layers": self.target.num_layers,
            "base_model_name_or_path": self.target.lm.name,
        }
        write_draft(folder, content | self.format_keys(), module.tensors())

    @property
    def shared_keys(self) -> dict[str, Any]:
        """The mask token and the layers that it reads, by the names of all formats."""
        return {"mask_token_id": self.mask_token, "target_layer_ids": list(self.taps)}

    def format_keys(self) -> dict[str, Any]:
        """The keys of a configuration that tell the format and its sizes: z-lab's."""
        return {
            "architectures": ["DFlashDraftModel"],
            "block_size": self.block_size,
            "dflash_config": {**self.shared_keys, "sample_from_anchor": self.from_anchor},
        }

    def settled(self) -> dict[str, Any]:
        """Layers read, the draft's own layers, block size and mask token."""
        sizes = {"layers": list(self.taps), "num_layers": self.num_layers, "depth": self.depth}
        sizes |= {"block_size": self.block_size, "loss_decay": self.loss_decay}
        return sizes | ({"mask_token": self.mask_token} if hasattr(self, "mask_token") else {})

    @property
    def loss_decay(self) -> float:
        """γ of the weights of a block's rows."""
        return loss_decay(self.block_size)

    def _layer_config(self) -> Qwen3Config:
        keys = self.target.layer_keys(self.settings.intermediate_size)
        return Qwen3Config(
            **keys,
            num_hidden_layers=self.num_layers,
            layer_types=["full_attention"] * self.num_layers,
            tie_word_embeddings=False,
        )


@dataclass(frozen=True, slots=True)
class PredictedRows:
    """The n rows of a batch whose tokens count.

    Args:
        states: behind the final norm [n, hidden].
        logits: of the target's output layer [n, V] float32.
        p: log-probabilities of the target [n, V].
        before: the text's token before each row's [n] int64.
        tokens: the text's token of each [n] int64.
        blocks: numbers of their blocks [n] int64.
        depths: tokens of the block before each [n] int64.
        decays: weights of the rows by their places alone [n].
    """

    states: Tensor
    logits: Tensor
    p: Tensor
    before: Tensor
    tokens: Tensor
    blocks: Tensor
    depths: Tensor
    decays: Tensor


class DFlashModule(NamedModule):
    """The draft and the loss of its blocks.

    Args:
        config: of its layers.
        weights: by published names.
        embedding: [V, hidden] of the target, frozen.
        output_layer: [V, hidden] of the target, frozen.
        method: gives the blocks' form and the mask token.
    """

    layer_type: ClassVar[type[HeadLayer]] = HeadLayer
    embedding: Tensor
    output_layer: Tensor

    def __init__(
        self,
        config: Qwen3Config,
        weights: dict[str, Tensor],
        embedding: Tensor,
        output_layer: Tensor,
        method: DFlashTraining,
    ) -> None:
        super().__init__(weights, method.loss)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("output_layer", output_layer, persistent=False)
        self._layers = [self.layer_type(config, self._of_layer(i)) for i in range(method.num_layers)]
        self._size, self._mask, self._decay = method.block_size, method.mask_token, method.loss_decay
        self._first = 0 if method.from_anchor else 1  # row that gives the first token
        self._depth, self._most_anchors = method.depth, method.settings.num_anchors
        self._is_paced = method.settings.position_weights == "d-pace"

    def forward(self, batch: TrainingBatch) -> BatchLoss:
        """Mean over the predicted tokens of their weighted losses; see the module."""
        assert batch.features is not None, "the batch brings the states of `taps`"
        anchors, is_real = self.anchors(batch)
        states = self._states(batch, anchors)
        samples, blocks, rows = self._rows(batch, anchors, is_real)
        places = anchors[samples, blocks] + rows - self._first  # whose logits predict each row's token
        predicting = states[samples, blocks, rows]
        logits = functional.linear(predicting, self.output_layer).float()
        p = batch.logits[samples, places].log_softmax(-1)
        before, tokens = batch.tokens[samples, places], batch.tokens[samples, places + 1]
        numbers = samples * anchors.shape[1] + blocks
        depths = rows - self._first
        return self.loss_of(PredictedRows(predicting, logits, p, before, tokens, numbers, depths, self.decays(rows)))

    def decays(self, rows: Tensor) -> Tensor:
        """Weights [n] of rows [n] int64 of their blocks."""
        return torch.exp(-(rows - 1).clamp(min=0) / self._decay)

    def loss_of(self, rows: PredictedRows) -> BatchLoss:
        """The loss of rows whose logits are all there is to them."""
        q = rows.logits.log_softmax(-1)
        weights = self.row_weights(rows, q)
        return BatchLoss(self.loss(q, rows.p, weights), *matched(q.detach(), rows.p, rows.depths, self._depth))

    def row_weights(self, rows: PredictedRows, q: Tensor) -> Tensor:
        """Weights [n] of rows in the loss, by the draft's log-probabilities q [n, V] where the settings say so."""
        if not self._is_paced:
            return rows.decays
        likely = q.detach().gather(1, rows.tokens[:, None])[:, 0].exp()
        return pace_weights(likely, rows.blocks, rows.depths)

    def anchors(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Positions [B, A] int64 where blocks begin, ascending, and which of them are some [B, A] bool.

        They are drawn from an answer's tokens that another one follows, in each sample by its own seed.
        """
        is_candidate = batch.is_counted & functional.pad(batch.is_counted[:, 1:], (0, 1))
        most = max(min(int(is_candidate.sum(1).max()), self._most_anchors), 1)
        lots = torch.full(is_candidate.shape, -1.0, device=is_candidate.device)
        for row, its in enumerate(is_candidate):
            lots[row, its] = torch.rand(int(its.sum()), generator=batch.generator(row)).to(lots.device)
        drawn = lots.topk(most, 1)
        anchors, order = drawn.indices.sort(1)
        return anchors, (drawn.values >= 0).gather(1, order)

    def _rows(self, batch: TrainingBatch, anchors: Tensor, is_real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Samples, blocks and rows [n] whose tokens count: those of the anchor's answer."""
        rows = torch.arange(self._first, self._size, device=anchors.device)
        places = anchors[..., None] + rows + 1 - self._first  # of the predicted tokens
        padded = functional.pad(batch.answers, (0, self._size))
        answers = padded[torch.arange(len(anchors), device=anchors.device)[:, None, None], places]
        counts = (answers == batch.answers.gather(1, anchors)[..., None]) & is_real[..., None]
        samples, blocks, rows = counts.nonzero(as_tuple=True)
        return samples, blocks, rows + self._first

    def _states(self, batch: TrainingBatch, anchors: Tensor) -> Tensor:
        """States [B, A, rows, hidden] of all blocks, behind the final norm."""
        assert batch.features is not None, "the batch brings the states of `taps`"
        norm = self._layers[0].norm
        joined = functional.linear(batch.features.flatten(2), self.weights["fc.weight"])
        context = norm(joined, self.weights["hidden_norm.weight"]).flatten(0, 1)
        tokens = torch.full((*anchors.shape, self._size), self._mask, device=anchors.device)
        tokens[..., 0] = batch.tokens.gather(1, anchors)
        hidden = functional.embedding(tokens.flatten(), self.embedding)
        attention = _BlockAttention(anchors, self._size, batch.tokens.shape[1])
        for i, layer in enumerate(self._layers):
            inputs = norm(hidden, self.weights[f"layers.{i}.input_layernorm.weight"])
            hidden = self.run_layer(layer, hidden, inputs, partial(attention.run, layer, context))
        return norm(hidden, self.weights["norm.weight"]).view(*tokens.shape, -1)

    def run_layer(self, layer: HeadLayer, hidden: Tensor, inputs: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """A layer's output [n, hidden] of all blocks' rows.

        Args:
            layer: of the stack.
            hidden: of the layer before [n, hidden].
            inputs: the same, normalized.
            attend: what attention finds for its inputs, before its projection.
        """
        return layer.finish(hidden, attend(inputs))

    def _of_layer(self, i: int) -> dict[str, Tensor]:
        start = f"layers.{i}."
        return {name.removeprefix(start): weight for name, weight in self.weights.items() if name.startswith(start)}


class _BlockAttention:
    """Attention of the rows of all blocks to the context before their anchors, and to their own block both ways.

    Args:
        anchors: [B, A] int64.
        size: rows of a block.
        length: N, positions of the context.
    """

    def __init__(self, anchors: Tensor, size: int, length: int) -> None:
        self._shape, self._length = (*anchors.shape, size), length
        self._places = (anchors[..., None] + torch.arange(size, device=anchors.device)).flatten()
        self._context_places = torch.arange(length, device=anchors.device).repeat(len(anchors))
        behind = torch.arange(length, device=anchors.device) >= anchors[..., None]  # [B, A, N]
        self._is_hidden = behind[:, None, :, None]

    def run(self, layer: HeadLayer, context: Tensor, inputs: Tensor) -> Tensor:
        """Attention's result [rows, heads * head size].

        Args:
            layer: whose projections it uses.
            context: [B * N, hidden], which is not normalized.
            inputs: of the blocks' rows [B * A * size, hidden].
        """
        queries, keys, values = (layer.heads(inputs, name) for name in "qkv")
        queries, keys = layer.rotate(self._places, queries, keys)
        [context_keys] = layer.rotate(self._context_places, layer.heads(context, "k"))
        context_values, groups = layer.heads(context, "v"), len(queries) // len(keys)
        queries = self._of_blocks(queries, 1)
        keys, values = self._of_blocks(keys, groups), self._of_blocks(values, groups)
        context_keys, context_values = (self._of_context(states, groups) for states in (context_keys, context_values))
        scores = queries.flatten(2, 3) @ context_keys.transpose(-1, -2)
        scores = scores.view(*queries.shape[:-1], self._length).masked_fill(self._is_hidden, -torch.inf)
        own = queries @ keys.transpose(-1, -2)
        weights = (torch.cat([scores, own], -1) * queries.shape[-1] ** -0.5).softmax(-1)
        seen: Tensor = weights[..., : self._length].flatten(2, 3) @ context_values
        attended: Tensor = seen.view(queries.shape) + weights[..., self._length :] @ values
        return attended.permute(0, 2, 3, 1, 4).flatten(3).flatten(0, 2)

    def _of_blocks(self, heads: Tensor, groups: int) -> Tensor:
        """[B, heads, A, size, head size] of [heads, B * A * size, head size], each head for so many query heads."""
        repeated = heads.repeat_interleave(groups, 0)
        return repeated.view(len(repeated), *self._shape, -1).transpose(0, 1)

    def _of_context(self, heads: Tensor, groups: int) -> Tensor:
        """[B, heads, N, head size] of [heads, B * N, head size]."""
        repeated = heads.repeat_interleave(groups, 0)
        return repeated.view(len(repeated), -1, self._length, heads.shape[-1]).transpose(0, 1)


def pace_weights(likely: Tensor, blocks: Tensor, depths: Tensor) -> Tensor:
    """D-PACE's weights [n] of rows (arXiv 2605.18810): w_j is the sum over m >= j of the product of c_i to i = m.

    c_i is 0.5 + 0.5 q_i, so that rows behind an unlikely token keep some weight.

    Args:
        likely: q_i, the draft's probability of each row's token [n], without gradient.
        blocks: numbers of their blocks [n] int64.
        depths: tokens of the block before each [n] int64; a block's first rows are all there.
    """
    if not len(likely):
        return likely
    reached = likely.new_zeros(int(blocks.max()) + 1, int(depths.max()) + 1)
    reached[blocks, depths] = 0.5 + 0.5 * likely
    return reached.cumprod(1).flip(1).cumsum(1).flip(1)[blocks, depths]


def loss_decay(block_size: int) -> float:
    """γ of the weights of a block's rows: 7 for blocks of 16 rows, 5 for 10, 4 for 8, as z-lab has them."""
    return min(block_size / 2, _LARGEST_DECAY)


def _spread_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose outputs are read: z-lab's five where the target is deep enough, else all or evenly spread ones."""
    if num_layers >= 2 * _MOST_TAPS:
        return default_layers(num_layers, _MOST_TAPS)
    num = min(num_layers, 3)
    return tuple(round(i * (num_layers - 1) / max(num - 1, 1)) for i in range(num))
