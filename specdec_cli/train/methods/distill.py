"""Distillation of a small language model on the target's text: the loss is its divergence from the target.

The model begins as a smaller model with the target's tokenizer, or as the target itself with fewer layers and narrower
feed-forward layers. Forward KL on the target's own text is the loss of sequence-level distillation (DistillSpec, Zhou
et al. 2024, arXiv 2310.08461); total variation is one minus the acceptance rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from specdec_cli.errors import UsageError
from specdec_cli.lm.forward.taps import decoder_layers
from specdec_cli.train.language_model import load_start, write_language_model
from specdec_cli.train.losses import LOSSES
from specdec_cli.train.method import BatchLoss, DraftModule, TrainingMethod

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Train
    from specdec_cli.train.samples import TrainingBatch
    from specdec_cli.train.target import TrainingTarget

_DEFAULT_DEPTH = 4
_PRUNED_SHARE = 4  # of the target's layers one in four stays
_GATED = ("gate_proj", "up_proj", "down_proj")


class DistillTraining(TrainingMethod):
    """Trains a plain language model on the target's distributions.

    Args:
        settings: as for every method.
        target: as for every method.

    Attributes:
        start: the model that it begins with: another one, or the target.

    Raises:
        UsageError: settings of other methods, more layers or units than there are, a target that cannot be
            pruned, or a model with another tokenizer.
        RunError: it does not load.
    """

    name: ClassVar[str] = "distill"
    drafts_with: ClassVar[str | None] = None
    own_settings: ClassVar[frozenset[str]] = frozenset({"start_from", "num_layers", "intermediate_size"})
    starts_trained: ClassVar[bool] = True

    def __init__(self, settings: Train, target: TrainingTarget) -> None:
        super().__init__(settings, target)
        self.start = load_start(settings.start_from or target.lm.name, target, self.name)
        if settings.start_from is None:
            self._check_sizes()

    @property
    def depth(self) -> int:
        """Tokens that the evaluation drafts; the training does not depend on it."""
        return self.settings.depth or _DEFAULT_DEPTH

    @property
    def layers(self) -> Sequence[int]:
        """The layers that stay, counted from 0: the first, the last, and others evenly between them."""
        whole = self.target.num_layers
        num = self.settings.num_layers or max(1, whole // _PRUNED_SHARE)
        if self.settings.start_from is not None or num >= whole:
            return range(whole)
        return [round(i * (whole - 1) / max(1, num - 1)) for i in range(num)]

    def build(self) -> DistillModule:
        """The other model as it is, or the target without the layers and units that are pruned."""
        torch.manual_seed(self.settings.seed)
        model = self.start.model()
        if self.settings.start_from is None:
            keep_layers(model, self.layers)
            if self.settings.intermediate_size is not None:
                narrow(model, self.settings.intermediate_size)
        return DistillModule(model.to(self.target.device), self.settings.loss)

    def save(self, module: DraftModule, folder: Path) -> None:
        """Write a plain model folder with the tokenizer that it began with."""
        assert isinstance(module, DistillModule), "a method saves what it has built"
        write_language_model(module.model, self.start.folder, folder, {})

    def settled(self) -> dict[str, Any]:
        """The model that it begins with, and the layers that stay of the target's."""
        pruned = {} if self.settings.start_from else {"layers": list(self.layers)}
        return {"start_from": self.start.name, "depth": self.depth, **pruned}

    def _check_sizes(self) -> None:
        num, width = self.settings.num_layers, self.settings.intermediate_size
        whole, units = self.target.num_layers, getattr(self.target.config, "intermediate_size", None)
        if num is not None and num > whole:
            raise UsageError(f"`num_layers` is `{num}`, and the target has {whole} layers", "lower --num-layers")
        if width is not None and (units is None or width > units):
            said = f"`intermediate_size` is `{width}`, and the target's is `{units}`"
            raise UsageError(said, "lower --intermediate-size, or leave it out")
        model = self.start.skeleton()
        layers = decoder_layers(model)
        if width is not None:
            for layer in layers:
                _gated_parts(layer, model.config.model_type)


class DistillModule(DraftModule):
    """The language model and its loss.

    Args:
        model: of transformers.
        loss: its name.
    """

    def __init__(self, model: Any, loss: str) -> None:
        super().__init__()
        self.model, self._loss = model, LOSSES[loss]

    def forward(self, batch: TrainingBatch) -> BatchLoss:
        """Mean loss over the answers' tokens. Padding lies behind the text, where causal attention does not look."""
        logits = self.model(input_ids=batch.tokens, use_cache=False).logits
        samples, places = batch.is_counted[:, 1:].nonzero(as_tuple=True)
        num = min(logits.shape[-1], batch.logits.shape[-1])  # what only one of both scores is padding
        q = logits[samples, places, :num].float().log_softmax(-1)
        p = batch.logits[samples, places, :num].log_softmax(-1)
        counted = torch.tensor([float(len(places))], device=q.device)
        matches = (q.detach().argmax(-1) == p.argmax(-1)).sum() / counted.clamp(min=1)
        return BatchLoss(self._loss(q, p).sum() / counted.clamp(min=1)[0], matches, counted)


def keep_layers(model: Any, layers: Sequence[int]) -> None:
    """Drop the decoder layers of a transformers model that are not named, and number the others again.

    Raises:
        UsageError: its layers stand in no list.
    """
    whole = decoder_layers(model)
    kept = [whole[i] for i in layers]
    decoder = model.get_decoder()
    name = next(name for name, one in decoder.named_children() if one is whole)
    setattr(decoder, name, nn.ModuleList(kept))
    for number, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    config = model.config.get_text_config()
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[i] for i in layers]


def narrow(model: Any, intermediate_size: int) -> None:
    """Keep the units of each gated feed-forward layer whose weights are largest.

    A unit's size is the product of the norms of what it reads and what it writes.

    Raises:
        UsageError: the feed-forward layers have another shape.
    """
    for layer in decoder_layers(model):
        gate, up, down = _gated_parts(layer, model.config.model_type)
        sizes = gate.weight.norm(dim=1) * up.weight.norm(dim=1) * down.weight.norm(dim=0)
        kept = sizes.topk(intermediate_size).indices.sort().values
        for part, dim in ((gate, 0), (up, 0), (down, 1)):
            _keep_units(part, kept, dim)
        if hasattr(layer.mlp, "intermediate_size"):
            layer.mlp.intermediate_size = intermediate_size
    model.config.get_text_config().intermediate_size = intermediate_size


def _gated_parts(layer: Any, model_type: str) -> list[Any]:
    """The projections of a layer's gated feed-forward layer: gate, up and down."""
    mlp = getattr(layer, "mlp", None)
    parts = [getattr(mlp, name, None) for name in _GATED]
    if not all(isinstance(one, nn.Linear) for one in parts):
        said = f"the feed-forward layers of a `{model_type}` model cannot be made narrower"
        raise UsageError(said, "leave --intermediate-size out")
    return parts


def _keep_units(linear: nn.Linear, kept: Tensor, dim: int) -> None:
    """Cut a linear layer to some of its outputs (dimension 0) or inputs (1)."""
    linear.weight = nn.Parameter(linear.weight.detach().index_select(dim, kept))
    if dim == 0 and linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach()[kept])
    linear.out_features, linear.in_features = linear.weight.shape
