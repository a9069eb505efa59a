"""Published folders of Medusa heads (arXiv 2401.10774): what their configurations say, and the shapes of their tensors.

Sources: FasterDecoding/Medusa (`medusa_model.py`) and vLLM 0.32 (`models/medusa.py`), whose converted names are the
common ones here. The authors' configuration has no sizes, which follow from the tensors; it may also count fewer heads
than its file has, and their code runs all of them. A converted folder runs as many as its `num_heads` says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.contents import head_kind
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.heads.head_tensors import stored_shapes
from specdec_cli.lm.heads.published import DraftFormat, PublishedDraft

_AGAIN = "copy or download the draft again"
_OTHER = "choose a draft that was made for this target"
_OWN_NAME = re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.(?P<linear>linear\.)?(?P<part>weight|bias)")


@dataclass(frozen=True, slots=True)
class MedusaConfig(PublishedDraft):
    """The configuration of Medusa heads. Sizes are None where neither it nor the tensors say them yet.

    Args:
        name: of the draft, for messages.
        folder: where it is.
        method: `medusa`.
        file_format: who writes such folders: `Medusa` or `vLLM`.
        num_heads: drafted tokens.
        num_layers: residual blocks of each head.
        hidden_size: width of the hidden states that they read.
        vocab_size: the target's vocabulary that they were made for.
        draft_vocab_size: tokens that they can draft.
        num_rows: of an output layer's weight, which may hold more tokens than are drafted.
        has_bias: whether residual blocks add one; None takes those that are there.
        shares_output: all heads have one output layer.
    """

    ids_tensor: ClassVar[str] = "token_map"
    own_files: ClassVar[tuple[str, ...]] = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")

    file_format: str
    num_heads: int
    num_layers: int
    hidden_size: int | None
    vocab_size: int | None
    draft_vocab_size: int | None
    num_rows: int | None
    has_bias: bool | None
    shares_output: bool

    def __str__(self) -> str:
        """For people."""
        kind = "Medusa heads" + (", vLLM format" if self.file_format == "vLLM" else "")
        known = self.draft_vocab_size is not None and self.vocab_size is not None
        tokens = f"; {self.draft_vocab_size} of {self.vocab_size} tokens" if known else ""
        return f"{kind}: read the final hidden states; draft up to {self.num_heads} tokens in one pass{tokens}"

    def given(self, options: Mapping[str, Any], num_layers: Callable[[], int]) -> MedusaConfig:
        """There is nothing to settle."""
        return self

    def options(self) -> dict[str, Any]:
        """None."""
        return {}

    def check_fits(self, target: str, hidden_size: int, vocab_size: int) -> None:
        """By the width of hidden states and the size of the vocabulary."""
        if self.hidden_size not in (None, hidden_size):
            said = f"the draft `{self.name}` reads hidden states of width {self.hidden_size}"
            raise UsageError(f"{said}, and `{target}` has {hidden_size}", _OTHER)
        if self.vocab_size not in (None, vocab_size):
            said = f"the draft `{self.name}` was made for {self.vocab_size} tokens"
            raise UsageError(f"{said}, and `{target}` scores {vocab_size}", _OTHER)

    @property
    def kv_numbers(self) -> int:
        """None are kept: heads read one hidden state alone."""
        return 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the residual blocks and the output layers."""
        size, rows, drafted = self.hidden_size or 0, self.num_rows or 0, self.draft_vocab_size or 0
        bias = "bias?" if self.has_bias is None else "bias"
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(self.num_heads):
            for j in range(self.num_layers):
                shapes[f"blocks.{i}.layers.{j}.weight"] = (size, size)
                if self.has_bias is not False:
                    shapes[f"blocks.{i}.layers.{j}.{bias}"] = (size,)
            shapes[f"lm_heads.{i}.weight{'?' if self.shares_output else ''}"] = (rows, size)
        if self.shares_output:
            shapes["lm_head.weight?"] = (rows, size)
        shapes["token_map" if drafted != self.vocab_size else "token_map?"] = (drafted,)
        return shapes

    def reads(self, name: str) -> bool:
        """All tensors but those of heads that are left out, and biases that the configuration denies."""
        found = re.match(r"(?:blocks|lm_heads)\.(\d+)\.", name)
        is_left_out = found is not None and int(found[1]) >= self.num_heads
        return not is_left_out and not (self.has_bias is False and name.endswith(".bias"))

    def drafted_ids(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """By `token_map`, where they draft fewer tokens than the target has."""
        return tensors.get("token_map") if self.draft_vocab_size != self.vocab_size else None

    @staticmethod
    def common_name(name: str) -> str:
        """As in folders that were converted for vLLM."""
        name = re.sub(r"^medusa_heads?\.", "", name)
        found = _OWN_NAME.fullmatch(name)
        if found is None:
            return name
        if found["linear"]:
            return f"blocks.{found['head']}.layers.{found['layer']}.{found['part']}"
        return f"lm_heads.{found['head']}.{found['part']}"


def read_medusa_config(name: str, folder: Path, content: dict[str, Any]) -> MedusaConfig:
    """The configuration of a folder that holds Medusa heads.

    Args:
        name: of the draft, for messages.
        folder: where it is.
        content: of its `config.json`.

    Raises:
        UsageError: it has no heads.
        RunError: its configuration or its tensors cannot be read.
    """
    stored = stored_shapes(MedusaConfig, name, folder)
    num_stored, num_layers = _most(stored, r"lm_heads\.(\d+)\."), _most(stored, r"blocks\.\d+\.layers\.(\d+)\.")
    rows, width = next((one for key, one in stored.items() if key.startswith("lm_head")), (None, None))
    is_converted = "num_heads" in content
    try:
        vocab_size = _number(content, "vocab_size") or rows
        drafted = _number(content, "truncated_vocab_size") or vocab_size
        num_heads = _number(content, "num_heads") or max(_number(content, "medusa_num_heads") or 0, num_stored)
        num_layers = max(
            _number(content, "num_hidden_layers" if is_converted else "medusa_num_layers") or 1, num_layers
        )
        hidden_size = _number(content, "hidden_size") or width
    except (TypeError, ValueError, OverflowError) as error:
        said = f"`{folder / 'config.json'}` is not a valid configuration: {first_line(error)}"
        raise RunError(said, _AGAIN) from error
    if num_heads < 1:
        raise UsageError(f"the folder of the Medusa draft `{name}` has no heads", _AGAIN)
    has_bias = content.get("medusa_fc_bias", None if is_converted else True)
    return MedusaConfig(
        name=name,
        folder=folder,
        method="medusa",
        file_format="vLLM" if is_converted else "Medusa",
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=drafted,
        num_rows=rows if rows in (vocab_size, drafted) else drafted,
        has_bias=None if has_bias is None else bool(has_bias),
        shares_output=bool(content.get("original_lm_head", False)),
    )


def _number(content: Mapping[str, Any], key: str) -> int | None:
    """A number of the configuration; None where it does not say it."""
    return None if content.get(key) is None else int(content[key])


def _most(stored: Mapping[str, Any], pattern: str) -> int:
    """One more than the largest number in tensors' names."""
    found = [re.match(pattern, name) for name in stored]
    return max((int(one[1]) + 1 for one in found if one), default=0)


FORMAT = DraftFormat(
    "set of Medusa heads",
    ("medusa",),
    lambda folder, content: head_kind(folder, content) == "medusa",
    read_medusa_config,
)
