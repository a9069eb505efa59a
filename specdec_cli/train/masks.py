"""Mask tokens: a token of the vocabulary that stands for those that are not drafted yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Train
    from specdec_cli.train.samples import Sample


def check_mask_token(settings: Train, vocab_size: int) -> None:
    """Refuse a mask token of the settings that a vocabulary does not have.

    Raises:
        UsageError: it does not.
    """
    if settings.mask_token is not None and settings.mask_token >= vocab_size:
        message = f"the mask token is `{settings.mask_token}`, and the vocabulary has {vocab_size} tokens"
        raise UsageError(message, "name another one, or leave it out")


def mask_token(samples: Sequence[Sample], vocab_size: int, settings: Train) -> int:
    """The mask token: that of the settings, else the rarest token of the samples, the last of those alike.

    Vocabularies mostly end with tokens that no text has, so that the rarest one is among them.

    Args:
        samples: with prompts.
        vocab_size: tokens to choose from.
        settings: the recipe's `train` section.
    """
    if settings.mask_token is not None:
        return settings.mask_token
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        known = torch.tensor([token for token in sample.tokens if token < vocab_size], dtype=torch.int64)
        counts += torch.bincount(known, minlength=vocab_size)
    return vocab_size - 1 - int(counts.flip(0).argmin())
