"""Published folders of PARD drafts: ordinary causal LMs with a mask token (An et al. 2025, arXiv 2504.18583).

Source: AMD-AGI/PARD (`pard_infer.py`). `config.json` has `pard_token` and `spd_type: pard`; there are no new tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from specdec_cli.errors import UsageError
from specdec_cli.lm.heads.published import DraftFormat, PublishedDraft

_HINT = "copy or download the draft again"


@dataclass(frozen=True, slots=True)
class PardConfig(PublishedDraft):
    """The configuration of a PARD draft.

    Args:
        name: of the draft, for messages.
        folder: where it is.
        method: `pard`.
        family: `model_type` of the language model.
        mask_token: whose rows give the second drafted token and those behind it.
        vocab_size: tokens that it reads and scores.
    """

    runs_as_target: ClassVar[bool] = False

    family: str
    mask_token: int
    vocab_size: int

    def __str__(self) -> str:
        """For people."""
        return (
            f"PARD draft: a `{self.family}` model that drafts all tokens in one pass, by mask token {self.mask_token}"
        )

    def given(self, options: Mapping[str, Any], num_layers: Callable[[], int]) -> PardConfig:
        """There is nothing to settle."""
        return self

    def options(self) -> dict[str, Any]:
        """None."""
        return {}

    def check_fits(self, target: str, hidden_size: int, vocab_size: int) -> None:
        """It reads no hidden states; tokenizers are compared, and what only the draft scores is cut off."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of its language model, which loading checks."""
        return {}


def read_pard_config(name: str, folder: Path, content: Mapping[str, Any]) -> PardConfig:
    """The configuration of a folder that holds a PARD draft.

    Raises:
        UsageError: it has no mask token that its model reads.
    """
    mask, vocabulary = content.get("pard_token"), content.get("vocab_size")
    if type(mask) is not int:
        raise UsageError(f"the configuration of the PARD draft `{name}` has no `pard_token`", _HINT)
    if type(vocabulary) is not int or not 0 <= mask < vocabulary:
        said = f"`pard_token` of the PARD draft `{name}` is `{mask}`, and its `vocab_size` is `{vocabulary}`"
        raise UsageError(said, _HINT)
    return PardConfig(name, folder, "pard", str(content.get("model_type")), mask, vocabulary)


def _recognizes(_folder: Path, content: Mapping[str, Any]) -> bool:
    kind = content.get("spd_type", "pard" if "pard_token" in content else None)
    return bool(kind == "pard")


FORMAT = DraftFormat("PARD draft", ("pard",), _recognizes, read_pard_config)
