"""Mask tokens: a token of the vocabulary that stands for those that are not drafted yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Train
    from specdec_cli.train.samples import Sample


def rarest_token(samples: Sequence[Sample], vocab_size: int, settings: Train) -> int:
    """The mask token: that of the settings, else the rarest token of the samples, the last of those alike.

    Vocabularies mostly end with tokens that no text has, so that the rarest one is among them.

    Args:
        samples: with prompts.
        vocab_size: tokens to choose from.
        settings: the recipe's `train` section.

    Raises:
        UsageError: the settings name a token that is not in the vocabulary.
    """
    given = settings.mask_token
    if given is not None:
        if given >= vocab_size:
            raise UsageError(f"the mask token is `{given}`, and the vocabulary has {vocab_size} tokens", "name another")
        return given
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for one in samples:
        known = torch.tensor([token for token in one.tokens if token < vocab_size], dtype=torch.int64)
        counts += torch.bincount(known, minlength=vocab_size)
    return vocab_size - 1 - int(counts.flip(0).argmin())
