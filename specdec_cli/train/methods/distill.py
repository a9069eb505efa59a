"""Distillation of a small language model on the target's text: the loss is its divergence from the target.

The model begins as a smaller model with the target's tokenizer, or as the target itself with fewer and narrower layers
(see `train.pruning`). Forward KL on the target's own text is the loss of sequence-level distillation (DistillSpec, Zhou
et al. 2024, arXiv 2310.08461); total variation is one minus the acceptance rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from specdec_cli.errors import UsageError
from specdec_cli.lm.files.names import DRAFT_TOKENS
from specdec_cli.lm.reduced_lm import places_of
from specdec_cli.train.language_model import load_start, write_language_model
from specdec_cli.train.method import BatchLoss, DraftModule, TrainingMethod
from specdec_cli.train.pruning import check_pruning, importance_of, keep_layers, keep_tokens, narrowed
from specdec_cli.train.vocabulary import most_frequent
from specdec_cli.train.widths import WIDTHS, Widths

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Train
    from specdec_cli.train.samples import Sample, TrainingBatch
    from specdec_cli.train.target import TrainingTarget

_DEFAULT_DEPTH = 4
_PRUNED_SHARE = 4  # of the target's layers one in four stays
_MOST_TEXTS = 128  # that tell which parts of the target are important


class DistillTraining(TrainingMethod):
    """Trains a plain language model on the target's distributions.

    Attributes:
        start: the model that it begins with: another one, or the target.

    Raises:
        UsageError: settings of other methods, sizes beyond the target's, a target that cannot be pruned, sizes for
            another model than the target, or one with another tokenizer.
        RunError: it does not load.
    """

    name: ClassVar[str] = "distill"
    drafts_with: ClassVar[str | None] = None
    own_settings: ClassVar[frozenset[str]] = frozenset({"start_from", "num_layers", "draft_vocab_size", *WIDTHS})
    starts_trained: ClassVar[bool] = True

    def __init__(self, settings: Train, target: TrainingTarget) -> None:
        super().__init__(settings, target)
        self.start = load_start(settings.start_from or target.lm.name, target, self.name)
        self._texts: Sequence[Sample] = ()
        self._drafted: Tensor | None = None
        self._widths = self._checked_widths()

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

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Take some samples, spread over all, to find the target's most important parts."""
        num = min(len(samples), _MOST_TEXTS)
        self._texts = [samples[i * len(samples) // num] for i in range(num)]
        size = self.settings.draft_vocab_size
        if size is not None and size < self.start.vocab_size:
            self._drafted = most_frequent(samples, self.start.vocab_size, size)

    @property
    def drafted(self) -> Tensor | None:
        """The tokens that the draft keeps, the most frequent one first; None for all."""
        return self._drafted

    def build(self) -> DistillModule:
        """The other model as it is, or the target without the layers and the parts of layers that are pruned."""
        torch.manual_seed(self.settings.seed)
        model = self.start.model().to(self.target.device)
        if self.settings.start_from is None:
            importance = importance_of(model, self._texts) if self._widths else None
            keep_layers(model, self.layers)
            if self._widths and importance:
                model = narrowed(model, self._widths, importance.of_layers(self.layers))
        if self._drafted is not None:
            keep_tokens(model, self._drafted)
        return DistillModule(model, self.loss, self._drafted, self.start.vocab_size)

    def save(self, module: DraftModule, folder: Path) -> None:
        """Write a plain model folder with the tokenizer that it began with."""
        assert isinstance(module, DistillModule), "a method saves what it has built"
        keys = {} if self._drafted is None else {DRAFT_TOKENS: self._drafted.tolist()}
        write_language_model(module.model, self.start.folder, folder, keys, self.target.lm.dtype)

    def settled(self) -> dict[str, Any]:
        """The model that it begins with, and the layers that stay of the target's."""
        pruned = {} if self.settings.start_from else {"layers": list(self.layers)}
        return {"start_from": self.start.name, "depth": self.depth, **pruned}

    def _checked_widths(self) -> Widths | None:
        """The draft's widths, None for those it begins with, once all sizes are found to fit the target."""
        settings, whole = self.settings, self.target.num_layers
        named = [name for name in ("num_layers", *WIDTHS) if getattr(settings, name) is not None]
        if settings.start_from is not None:
            if named:
                message = f"`train.{named[0]}` prunes the target, and the draft begins as `{self.start.name}`"
                raise UsageError(message, f"leave --start-from or --{named[0].replace('_', '-')} out")
            return None
        if settings.num_layers is not None and settings.num_layers > whole:
            message = f"`num_layers` is `{settings.num_layers}`, and the target has {whole} layers"
            raise UsageError(message, "lower --num-layers")
        widths = Widths.of(self.target.config).narrower(settings) if set(named) & set(WIDTHS) else None
        check_pruning(self.start.skeleton(), self.layers, widths)
        return widths


class DistillModule(DraftModule):
    """The language model and its loss.

    Args:
        model: of transformers.
        loss: its name.
        drafted: the target's tokens [D] int64 that it keeps; None for all.
        vocab_size: V, the target's.
    """

    places: Tensor | None

    def __init__(self, model: Any, loss: str, drafted: Tensor | None = None, vocab_size: int = 0) -> None:
        super().__init__(loss)
        self.model = model
        places = None if drafted is None else places_of(drafted, vocab_size).to(model.device)
        self.register_buffer("places", places, persistent=False)

    def forward(self, batch: TrainingBatch) -> BatchLoss:
        """Mean loss over the answers' tokens. Padding lies behind the text, where causal attention does not look.

        A position counts only if the target's most likely token is one that the draft keeps.
        """
        tokens, counts = batch.tokens, batch.is_counted[:, 1:]
        if self.places is not None and batch.is_drafted is not None:
            tokens, counts = self.places[tokens], counts & batch.is_drafted[:, :-1]
        logits = self.model(input_ids=tokens, use_cache=False).logits
        samples, places = counts.nonzero(as_tuple=True)
        num = min(logits.shape[-1], batch.logits.shape[-1])  # what only one of both scores is padding
        q = logits[samples, places, :num].float().log_softmax(-1)
        p = batch.logits[samples, places, :num].log_softmax(-1)
        counted = torch.tensor([float(len(places))], device=q.device)
        matches = (q.detach().argmax(-1) == p.argmax(-1)).sum() / counted.clamp(min=1)
        return BatchLoss(self.loss(q, p), matches, counted)
