"""The draft vocabulary: the most frequent tokens of the answers, and its maps `d2t` and `t2d`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec_cli.train.samples import Sample

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Train

_SMALL = 16384  # vocabularies up to here are drafted whole
_USUAL = 32000


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Tokens that a draft scores.

    Args:
        ids: [drafted] int64, the target's ids, ascending.
        vocab_size: V, the target's.
    """

    ids: Tensor
    vocab_size: int

    @classmethod
    def by_frequency(cls, samples: Sequence[Sample], vocab_size: int, settings: Train) -> DraftVocabulary:
        """The most frequent tokens of the answers; all tokens of a small vocabulary.

        Of tokens that are equally frequent the lower ids come first.
        """
        size = settings.draft_vocab_size or (vocab_size if vocab_size <= _SMALL else _USUAL)
        if size >= vocab_size:
            return cls(torch.arange(vocab_size), vocab_size)
        return cls(most_frequent(samples, vocab_size, size).sort().values, vocab_size)

    def __len__(self) -> int:
        """Drafted tokens."""
        return len(self.ids)

    def tensors(self) -> dict[str, Tensor]:
        """`d2t` int64, how much larger the target's id of each drafted token is, and `t2d` bool; nothing if all are."""
        if len(self) == self.vocab_size:
            return {}
        is_drafted = torch.zeros(self.vocab_size, dtype=torch.bool)
        is_drafted[self.ids] = True
        return {"d2t": self.ids - torch.arange(len(self)), "t2d": is_drafted}


def most_frequent(samples: Sequence[Sample], vocab_size: int, num: int) -> Tensor:
    """The tokens [num] int64 that answers hold most often, the most frequent one first, of equal ones the lower id."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        counts += torch.bincount(torch.tensor(sample.tokens)[torch.tensor(sample.is_counted)], minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:num]
