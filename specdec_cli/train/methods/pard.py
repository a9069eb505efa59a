"""Training of PARD drafts (An et al. 2025, arXiv 2504.18583): a language model learns to go on behind mask tokens.

Row t of group 0 reads a text's token at t. Row t of group k is a mask at position t + k that sees the text up to t and
the masks of the same t before it, and predicts the token at t + k + 1: what a draft does in one pass. Conditional
dropping keeps fewer starts t in each further group, each of which is in the group before, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from specdec_cli.train.language_model import load_start, write_language_model
from specdec_cli.train.masks import check_mask_token, mask_token
from specdec_cli.train.method import BatchLoss, DraftModule, TrainingMethod
from specdec_cli.train.samples import Sample, TrainingBatch
from specdec_cli.train.weights import matched

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Train
    from specdec_cli.train.target import TrainingTarget

_DEFAULT_DEPTH = 8
_KEPT, _KEPT_AT_LEAST = 0.7, 0.2


class PardTraining(TrainingMethod):
    """Trains a language model with the target's tokenizer as a PARD draft.

    Attributes:
        start: the model that it begins with.

    Raises:
        UsageError: settings of other methods, no model to begin with, one that cannot be trained this way, or a mask
            token that it does not have.
        RunError: it does not load.
    """

    name: ClassVar[str] = "pard"
    drafts_with: ClassVar[str | None] = "pard"
    own_settings: ClassVar[frozenset[str]] = frozenset({"start_from", "mask_token"})
    starts_trained: ClassVar[bool] = True

    def __init__(self, settings: Train, target: TrainingTarget) -> None:
        super().__init__(settings, target)
        self.start = load_start(settings.start_from, target, self.name)
        check_mask_token(settings, self.start.vocab_size)

    @property
    def depth(self) -> int:
        """Tokens that one pass gives."""
        return self.settings.depth or _DEFAULT_DEPTH

    @property
    def rows_per_token(self) -> float:
        """Rows per token: one in each group that conditional dropping keeps."""
        return sum(max(_KEPT**group, _KEPT_AT_LEAST) for group in range(self.depth))

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Choose the mask token."""
        self.mask_token = mask_token(samples, self.start.vocab_size, self.settings)

    def build(self) -> PardModule:
        """The model as it is."""
        torch.manual_seed(self.settings.seed)
        model = self.start.model().to(self.target.device)
        return PardModule(model, self.depth, self.mask_token, self.loss)

    def save(self, module: DraftModule, folder: Path) -> None:
        """Write the model's own format, with the keys `pard_token` and `spd_type`."""
        assert isinstance(module, PardModule), "a method saves what it has built"
        keys = {"pard_token": self.mask_token, "spd_type": "pard"}
        write_language_model(module.model, self.start.folder, folder, keys, self.target.lm.dtype)

    def settled(self) -> dict[str, Any]:
        """Drafted tokens and the mask token."""
        return {"depth": self.depth} | ({"mask_token": self.mask_token} if hasattr(self, "mask_token") else {})


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The rows of a batch, padded to M, with what each sees.

    Args:
        tokens: [B, M] int64 that they read.
        positions: [B, M] int64.
        groups: [B, M] int64; masks before a row and itself, -1 for padding.
        visible: [B, M, M] bool, the rows that each row attends to.
        is_counted: [B, M] bool, the rows whose predicted token counts.
    """

    tokens: Tensor
    positions: Tensor
    groups: Tensor
    visible: Tensor
    is_counted: Tensor


class PardModule(DraftModule):
    """The language model and its loss."""

    def __init__(self, model: Any, depth: int, mask_token: int, loss: str) -> None:
        super().__init__(loss)
        self.model, self._depth, self._mask = model, depth, mask_token

    def forward(self, batch: TrainingBatch) -> BatchLoss:
        """Mean loss over the answers' tokens that rows of any group predict."""
        rows = masked_rows(batch, self._depth, self._mask)
        blocked = torch.zeros(rows.visible.shape, device=rows.tokens.device)
        blocked = blocked.masked_fill(~rows.visible, torch.finfo(blocked.dtype).min)[:, None]
        logits = self.model(
            input_ids=rows.tokens, position_ids=rows.positions, attention_mask=blocked, use_cache=False
        ).logits
        samples, places = rows.is_counted.nonzero(as_tuple=True)
        num = min(logits.shape[-1], batch.logits.shape[-1])  # what only one of both scores is padding
        q = logits[samples, places, :num].float().log_softmax(-1)
        p = batch.logits[samples, rows.positions[samples, places], :num].log_softmax(-1)
        return BatchLoss(self.loss(q, p), *matched(q.detach(), p, rows.groups[samples, places], self._depth))


def masked_rows(batch: TrainingBatch, depth: int, mask_token: int) -> MaskedRows:
    """The rows of a batch, those of group 0 first."""
    each = [
        _sample_rows(batch.tokens[row], answers, depth, mask_token, batch.generator(row))
        for row, answers in enumerate(batch.answers)
    ]
    longest = max(len(rows[0]) for rows in each)
    tokens, positions, groups, counts = (_padded([rows[i] for rows in each], longest) for i in range(4))
    length = batch.tokens.shape[1]
    starts = positions - groups.clamp(min=0)
    is_text = torch.arange(longest, device=tokens.device) < length
    sees_text = is_text & (positions[:, None] <= starts[..., None])
    same = (starts[:, None] == starts[..., None]) & (groups[:, None] <= groups[..., None])
    sees_masks = ~is_text & ~is_text[:, None] & same & (groups[:, None] > 0)
    own = torch.eye(longest, dtype=torch.bool, device=tokens.device)
    visible = (sees_text | sees_masks) & (groups[..., None] >= 0) | own
    return MaskedRows(tokens.clamp(min=0), positions.clamp(min=0), groups, visible, counts > 0)


def _sample_rows(
    tokens: Tensor, answers: Tensor, depth: int, mask_token: int, generator: torch.Generator | None
) -> list[Tensor]:
    """Tokens, positions, groups and whether they count of one sample's rows, each [rows] int64."""
    places = torch.arange(len(tokens), device=tokens.device)
    follows = torch.zeros_like(answers, dtype=torch.bool)
    follows[:-1] = answers[1:] > 0
    rows = [(tokens, places, torch.zeros_like(places), follows.long())]
    starts, num = places[follows], int(follows.sum())
    for group in range(1, depth):
        starts = starts[starts + group + 1 < len(tokens)]
        starts = starts[answers[starts + group + 1] == answers[starts + 1]]
        most = int(num * max(_KEPT**group, _KEPT_AT_LEAST))
        drawn = torch.randperm(len(starts), generator=generator)[:most].sort().values
        starts = starts[drawn.to(starts.device)]
        ones = torch.ones_like(starts)
        rows.append((ones * mask_token, starts + group, ones * group, ones))
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def _padded(rows: Sequence[Tensor], longest: int) -> Tensor:
    """[B, longest] int64, -1 behind the ends."""
    whole = rows[0].new_full((len(rows), longest), -1)
    for i, row_ in enumerate(rows):
        whole[i, : len(row_)] = row_
    return whole
