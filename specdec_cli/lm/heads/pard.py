"""PARD drafts as published: ordinary causal LMs with a mask token (An et al. 2025, arXiv 2504.18583).

Source: AMD-AGI/PARD (`pard_infer.py`). `config.json` has `pard_token` and `spd_type: pard`; there are no new tensors.
The drafting method `pard` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specdec_cli.errors import UsageError
from specdec_cli.lm.files.draft_formats import DraftFolder
from specdec_cli.lm.heads.published import AGAIN, PublishedDraft


@dataclass(frozen=True, slots=True, kw_only=True)
class PardDraft(PublishedDraft):
    """A PARD draft by its folder.

    Args:
        family: `model_type` of the language model.
        mask_token: whose rows give the second drafted token and those behind it.
    """

    runs_as_target: ClassVar[bool] = False

    family: str
    mask_token: int

    def __str__(self) -> str:
        """For people: the family and the mask token."""
        return (
            f"PARD draft: a `{self.family}` model that drafts all tokens in one pass, by mask token {self.mask_token}"
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of its language model, which loading checks."""
        return {}


def read(name: str, source: DraftFolder) -> PardDraft:
    """The PARD draft in a folder.

    Raises:
        UsageError: it has no mask token that its model reads.
    """
    mask, vocabulary = source.content.get("pard_token"), source.content.get("vocab_size")
    if type(mask) is not int:
        raise UsageError(f"the configuration of the PARD draft `{name}` has no `pard_token`", AGAIN)
    if type(vocabulary) is not int or not 0 <= mask < vocabulary:
        message = f"`pard_token` of the PARD draft `{name}` is `{mask}`, and its `vocab_size` is `{vocabulary}`"
        raise UsageError(message, AGAIN)
    return PardDraft(name=name, source=source, taps=(), family=str(source.content.get("model_type")), mask_token=mask)
