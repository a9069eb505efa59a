"""Training of EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840) in the official format.

The head is unrolled as it will draft ("training-time test"): step 0 reads the target's states, step i its own output of
step i - 1 and the text's token there, and attends to the true slots up to its anchor and to its own earlier steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from specdec_cli.errors import UsageError
from specdec_cli.lm.door import Tap
from specdec_cli.lm.heads.eagle import default_layers
from specdec_cli.lm.heads.head_layer import HeadLayer
from specdec_cli.train.method import BatchLoss, DraftModule, TrainingMethod
from specdec_cli.train.published import official_eagle3, write_draft
from specdec_cli.train.samples import Sample, TrainingBatch
from specdec_cli.train.vocabulary import DraftVocabulary

_DEFAULT_DEPTH = 5
_LAYER = "layers.0."
_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


class Eagle3Training(TrainingMethod):
    """Trains an EAGLE-3 head: one Llama layer on the joined states of three target layers."""

    name: ClassVar[str] = "eagle3"
    drafts_with: ClassVar[str | None] = "eagle3"
    own_settings: ClassVar[frozenset[str]] = frozenset(
        {"depth_decay", "layers", "draft_vocab_size", "intermediate_size"}
    )

    @property
    def taps(self) -> Sequence[Tap]:
        """The outputs of the layers that the settings name, or a low, a middle and a high one."""
        return self.settings.layers or _three_layers(self.target.num_layers)

    @property
    def depth(self) -> int:
        """Unrolled steps."""
        return self.settings.depth or _DEFAULT_DEPTH

    @property
    def rows_per_token(self) -> float:
        """Rows per token: one in each unrolled step."""
        return float(self.depth)

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Count the tokens of the answers for the draft vocabulary."""
        self.vocabulary = DraftVocabulary.by_frequency(samples, self.target.lm.vocab_size, self.settings)

    @property
    def drafted(self) -> Tensor | None:
        """The draft vocabulary, if that leaves tokens out."""
        return self.vocabulary.ids if len(self.vocabulary) < self.target.lm.vocab_size else None

    def build(self) -> Eagle3Module:
        """Small random projections; the output layer begins as the target's."""
        torch.manual_seed(self.settings.seed)
        config = self._layer_config()
        weights = _first_weights(config, len(self.taps) * self.target.hidden_size)
        weights["lm_head.weight"] = self.target.output_layer(self.vocabulary.ids)
        weights = {name: weight.to(self.target.device) for name, weight in weights.items()}
        return Eagle3Module(config, weights, self.target.embedding(), self)

    def save(self, module: DraftModule, folder: Any) -> None:
        """Write the official format: `midlayer.…`, both notations of the layers, no embedding."""
        assert isinstance(module, Eagle3Module), "a method saves what it has built"
        tensors = {name.replace(_LAYER, "midlayer."): weight.detach() for name, weight in module.weights.items()}
        keys = {
            "draft_vocab_size": len(self.vocabulary),
            "target_hidden_size": self.target.hidden_size,
            "norm_before_residual": False,
        }
        layers = [int(tap) for tap in self.taps]
        content = official_eagle3(self._layer_config(), layers, self.target.lm.name, keys)
        write_draft(folder, content, tensors | self.vocabulary.tensors())

    def settled(self) -> dict[str, Any]:
        """Layers read, unrolled steps, and the size of the draft vocabulary."""
        sizes = {"layers": list(self.taps), "depth": self.depth}
        return sizes | ({"draft_vocab_size": len(self.vocabulary)} if hasattr(self, "vocabulary") else {})

    def _layer_config(self) -> LlamaConfig:
        """One Llama layer of the target's shape, whatever its family."""
        return LlamaConfig(**self.target.layer_keys(self.settings.intermediate_size), num_hidden_layers=1)


class Eagle3Module(DraftModule):
    """The head and its unrolled loss.

    Args:
        config: of its layer.
        weights: by the names of published folders, `layers.0.` for the layer.
        embedding: [V, hidden] of the target, frozen.
        method: gives depth, loss and the weights of the steps.

    Attributes:
        weights: its parameters by their published names.
    """

    embedding: Tensor

    def __init__(
        self,
        config: LlamaConfig,
        weights: dict[str, Tensor],
        embedding: Tensor,
        method: Eagle3Training,
    ) -> None:
        super().__init__(method.loss)
        self.weights = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
        for name, weight in self.weights.items():
            self.register_parameter(name.replace(".", "/"), weight)
        self.register_buffer("embedding", embedding, persistent=False)
        self._layer = HeadLayer(
            config, {name.removeprefix(_LAYER): part for name, part in self.weights.items() if name.startswith(_LAYER)}
        )
        self._depth, self._decay = method.depth, method.settings.depth_decay

    def forward(self, batch: TrainingBatch) -> BatchLoss:
        """Sum over steps i of decay^i times the mean loss over the answers' tokens that step i predicts."""
        assert batch.features is not None, "the batch brings the states of `taps`"
        targets = _Targets(batch)
        shape = (
            batch.tokens.shape[0],
            batch.tokens.shape[1] - 1,
        )  # anchors: slot t pairs the states of t and token t + 1
        feature = functional.linear(batch.features[:, :-1].flatten(2).flatten(0, 1), self.weights["fc.weight"])
        attention, total, losses = _UnrolledAttention(self._layer, shape), batch.logits.new_zeros(()), []
        for step in range(self._depth):
            output = self._run(targets.given(step), feature, attention)
            loss, matches, num = self._step_loss(output, targets, step)
            total = total + self._decay**step * loss
            losses.append((matches, num))
            feature = output
        all_matches, nums = zip(*losses, strict=True)
        return BatchLoss(total, torch.stack(all_matches), torch.stack(nums))

    def _run(self, tokens: Tensor, feature: Tensor, attention: _UnrolledAttention) -> Tensor:
        """The layer's output [B * T, hidden] of one step at all anchors."""
        normalized = self._layer.norm(feature, self._of_layer("hidden_norm"))
        token = self._layer.norm(functional.embedding(tokens, self.embedding), self._of_layer("input_layernorm"))
        return self._layer.finish(feature, attention.step(torch.cat([token, normalized], -1)))

    def _step_loss(self, output: Tensor, targets: _Targets, step: int) -> tuple[Tensor, Tensor, Tensor]:
        rows, wanted = targets.wanted(step)
        normalized = self._layer.norm(output[rows], self.weights["norm.weight"])
        q = functional.linear(normalized, self.weights["lm_head.weight"]).float().log_softmax(-1)
        num = torch.tensor(float(len(rows)), device=output.device)
        matches = (q.argmax(-1) == wanted.argmax(-1)).sum().float() / num.clamp(min=1)
        return self.loss(q, wanted), matches.detach(), num

    def _of_layer(self, name: str) -> Tensor:
        return self.weights[f"{_LAYER}{name}.weight"]


class _Targets:
    """Inputs and targets of each step, anchor by anchor.

    Args:
        batch: with B samples of N tokens; anchors are the first N - 1 positions.
    """

    def __init__(self, batch: TrainingBatch) -> None:
        self._tokens, self._counts = batch.tokens, batch.is_counted
        self._log_probs = batch.logits.log_softmax(-1)
        if batch.is_drafted is not None:  # the token at t + 1 counts only if the target's most likely one is drafted
            self._counts = self._counts & functional.pad(batch.is_drafted, (1, 0))[:, :-1]

    def given(self, step: int) -> Tensor:
        """The tokens [B * T] that a step reads: anchor t that of t + step + 1; 0 behind the end."""
        return functional.pad(self._tokens, (0, step))[:, step + 1 :].flatten()

    def wanted(self, step: int) -> tuple[Tensor, Tensor]:
        """Rows [n] int64 of the anchors that count, and the target's log-probabilities [n, drafted] there.

        Step i at anchor t predicts the token at t + i + 2, by the target's logits at t + i + 1.
        """
        counts = functional.pad(self._counts, (0, step + 1))[:, step + 2 :]
        samples, anchors = counts.nonzero(as_tuple=True)
        return samples * counts.shape[1] + anchors, self._log_probs[samples, anchors + step + 1]


class _UnrolledAttention:
    """Attention of all steps: a row sees the true slots up to its anchor, and its own anchor's earlier steps.

    Args:
        layer: whose projections it uses.
        shape: B samples, T anchors.
    """

    def __init__(self, layer: HeadLayer, shape: tuple[int, int]) -> None:
        self._layer, self._shape = layer, shape
        self._own: list[tuple[Tensor, Tensor]] = []
        self._mask: Tensor | None = None

    def step(self, inputs: Tensor) -> Tensor:
        """The next step's attention [B * T, heads * head size] of its inputs [B * T, width]."""
        batch, num = self._shape
        step = len(self._own)
        positions = torch.arange(step, num + step, device=inputs.device).repeat(batch)
        queries, keys, values = (self._layer.heads(inputs, name) for name in "qkv")
        queries, keys = self._layer.rotate(positions, queries, keys)
        groups = len(queries) // len(keys)
        queries, keys, values = (
            heads.view(-1, batch, num, self._layer.head_size).transpose(0, 1)
            for heads in (queries, keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0))
        )
        self._own.append((keys, values))
        attended = self._attend(queries)
        return attended.transpose(1, 2).reshape(batch * num, -1)

    def _attend(self, queries: Tensor) -> Tensor:
        """[B, heads, T, head size] of queries of the same shape."""
        (true_keys, true_values), *later = self._own
        num, scale = queries.shape[2], queries.shape[-1] ** -0.5
        if self._mask is None:
            self._mask = torch.ones(num, num, dtype=torch.bool, device=queries.device).triu(1)
        scores = (queries @ true_keys.transpose(-1, -2) * scale).masked_fill(self._mask, -torch.inf)
        own = [(queries * keys).sum(-1, keepdim=True) * scale for keys, _ in later]
        weights = torch.cat([scores, *own], -1).float().softmax(-1)
        attended = weights[..., :num] @ true_values
        for place, (_, values) in enumerate(later, num):
            attended = attended + weights[..., place : place + 1] * values
        return attended


def _three_layers(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer: EAGLE-3's own where the target is deep enough for three of them."""
    if num_layers >= 7:
        return default_layers(num_layers)
    if num_layers < 3:
        message = f"an EAGLE-3 head reads three layers of its target, which has {num_layers}"
        raise UsageError(message, "choose another method, or name the layers with --layers, such as --layers 0-1")
    return (0, num_layers // 2, num_layers - 1)


def _first_weights(config: LlamaConfig, joined: int) -> dict[str, Tensor]:
    """Random projections scaled by their inputs' width, norms of one, and no output of attention and MLP at first."""
    hidden = int(config.hidden_size)
    shapes = {f"{_LAYER}{name}": shape for name, shape in HeadLayer.shapes(config, 2 * hidden).items()}
    shapes |= {f"{_LAYER}{name}.weight": (hidden,) for name in _NORMS}
    shapes |= {"norm.weight": (hidden,), "fc.weight": (hidden, joined)}
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
