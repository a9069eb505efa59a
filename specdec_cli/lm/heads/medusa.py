"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): each guesses one further token from the same final hidden state.

Head i, counted from 0, reads the state behind the target's final norm at position t and predicts the token at
t + 2 + i, as the target itself predicts t + 1. It adds SiLU(W h + b) to the state h, once for every residual block, and
has an output layer of its own. Heads keep no keys and values and know no positions: a sequence is its last state.

Sources: FasterDecoding/Medusa (`medusa_model.py`) and vLLM 0.32 (`models/medusa.py`), whose converted names are the
common ones here. The authors' configuration has no sizes, which follow from the tensors; it may also count fewer heads
than its file has, and their code runs all of them. A converted folder runs as many as its `num_heads` says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.errors import UsageError
from specdec_cli.lm.files.draft_formats import DraftFolder
from specdec_cli.lm.heads.draft_sequences import Ahead, RecordedAhead
from specdec_cli.lm.heads.head import Head, checked_tensors, spread
from specdec_cli.lm.heads.head_layer import LayerFeed
from specdec_cli.lm.heads.head_sequences import HeadSequences
from specdec_cli.lm.heads.head_tensors import stored_shapes
from specdec_cli.lm.heads.published import AGAIN, PublishedDraft
from specdec_cli.lm.heads.stacks import product_of
from specdec_cli.quantities import counted

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM
    from specdec_cli.lm.heads.recorded_feed import RecordedFeed

_OWN_NAME = re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.(?P<linear>linear\.)?(?P<part>weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaDraft(PublishedDraft):
    """Medusa heads by their folder. Sizes are None where neither it nor the tensors say them yet.

    Args:
        file_format: who writes such folders: `Medusa` or `vLLM`.
        num_heads: drafted tokens.
        num_layers: residual blocks of each head.
        num_rows: of an output layer's weight, which may hold more tokens than are drafted.
        has_bias: whether residual blocks add one; None takes those that are there.
        shares_output: all heads have one output layer.
    """

    ids_tensor: ClassVar[str] = "token_map"

    file_format: str
    num_heads: int
    num_layers: int
    num_rows: int | None
    has_bias: bool | None
    shares_output: bool

    def __str__(self) -> str:
        """For people: how many tokens they draft, and which."""
        kind = "Medusa heads" + (", vLLM format" if self.file_format == "vLLM" else "")
        known = self.draft_vocab_size is not None and self.vocab_size is not None
        tokens = f"; {self.draft_vocab_size} of {self.vocab_size} tokens" if known else ""
        return (
            f"{kind}: read the final hidden states; draft up to {counted(self.num_heads, 'token')} in one pass{tokens}"
        )

    @property
    def kv_numbers(self) -> int:
        """None are kept: heads read one hidden state alone."""
        return 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the residual blocks and the output layers."""
        size, rows, drafted = self.target_hidden_size or 0, self.num_rows or 0, self.draft_vocab_size or 0
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
        shapes["token_map" if self.is_reduced else "token_map?"] = (drafted,)
        return shapes

    def reads(self, name: str) -> bool:
        """All tensors but those of heads that are left out, and biases that the configuration denies."""
        head = re.match(r"(?:blocks|lm_heads)\.(\d+)\.", name)
        is_left_out = head is not None and int(head[1]) >= self.num_heads
        return not is_left_out and not (self.has_bias is False and name.endswith(".bias"))

    def drafted_ids(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """By `token_map`, where they draft fewer tokens than the target has."""
        return tensors.get("token_map") if self.is_reduced else None

    @staticmethod
    def common_name(name: str) -> str:
        """As in folders that were converted for vLLM."""
        name = re.sub(r"^medusa_heads?\.", "", name)
        own = _OWN_NAME.fullmatch(name)
        if own is None:
            return name
        if own["linear"]:
            return f"blocks.{own['head']}.layers.{own['layer']}.{own['part']}"
        return f"lm_heads.{own['head']}.{own['part']}"


def read(name: str, source: DraftFolder) -> MedusaDraft:
    """The Medusa heads in a folder.

    Args:
        name: of the draft, for messages.
        source: the folder.

    Raises:
        UsageError: it has no heads.
        RunError: its configuration or its tensors cannot be read.
    """
    content = source.content
    stored = stored_shapes(MedusaDraft, name, source)
    num_stored, num_layers = _most(stored, r"lm_heads\.(\d+)\."), _most(stored, r"blocks\.\d+\.layers\.(\d+)\.")
    rows, width = next((shape for key, shape in stored.items() if key.startswith("lm_head")), (None, None))
    is_converted = "num_heads" in content
    number = partial(source.whole_number, content)
    vocab_size = number("vocab_size") or rows
    drafted = number("truncated_vocab_size") or vocab_size
    num_heads = number("num_heads") or max(number("medusa_num_heads") or 0, num_stored)
    num_layers = max(number("num_hidden_layers" if is_converted else "medusa_num_layers") or 1, num_layers)
    if num_heads < 1:
        raise UsageError(f"the folder of the Medusa draft `{name}` has no heads", AGAIN)
    has_bias = content.get("medusa_fc_bias", None if is_converted else True)
    return MedusaDraft(
        name=name,
        source=source,
        taps=("final",),
        target_hidden_size=number("hidden_size") or width,
        vocab_size=vocab_size,
        draft_vocab_size=drafted,
        file_format="vLLM" if is_converted else "Medusa",
        num_heads=num_heads,
        num_layers=num_layers,
        num_rows=rows if rows in (vocab_size, drafted) else drafted,
        has_bias=None if has_bias is None else bool(has_bias),
        shares_output=bool(content.get("original_lm_head", False)),
    )


def _most(stored: Mapping[str, Any], pattern: str) -> int:
    """One more than the largest number in tensors' names."""
    matches = [re.match(pattern, name) for name in stored]
    return max((int(match[1]) + 1 for match in matches if match), default=0)


class MedusaHead(Head):
    """A set of Medusa heads: one pass gives a token by each.

    It keeps no keys and values, and its output is the target's state.

    Args:
        draft: what their folder says.
        target: the loaded target, in whose dtype they compute.

    Attributes:
        draft: what their folder says.

    Raises:
        RunError: weights that cannot be read.
        UsageError: weights that are missing or of other shapes, or heads for another target.
    """

    is_one_pass = True

    def __init__(self, draft: MedusaDraft, target: LM) -> None:
        super().__init__(target, checked_tensors(draft, target), (0, 0), (0, 0))
        self.draft, self.most_tokens = draft, draft.num_heads
        blocks = [f"blocks.{i}.layers.{j}" for i in range(draft.num_heads) for j in range(draft.num_layers)]
        outputs = {self._output_name(i) for i in range(draft.num_heads)}
        self._products = {name: product_of(self.weights, name) for name in (*blocks, *outputs) if name is not None}
        self._ids = draft.target_ids(self.weights, target.name, target.vocab_size)

    def num_rows(self, depth: int) -> int:
        """None are kept."""
        return 0

    def run(self, embedded: Tensor, feature: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """The target's states as they are."""
        return feature

    def logits(self, output: Tensor, head: int = 0) -> Tensor:
        """Logits [n, V] float32 of one head's token; -inf where it cannot draft one.

        Args:
            output: the target's final hidden states [n, hidden].
            head: its number, counted from 0.
        """
        hidden = output
        for layer in range(self.draft.num_layers):
            product = self._products[f"blocks.{head}.layers.{layer}"](hidden)
            hidden = hidden + functional.silu(product.to(hidden.dtype))
        return spread(self._scores(hidden, head), self._ids, self.vocab_size)

    def ahead(self, sequences: HeadSequences, ends: Sequence[tuple[int, int, int]]) -> Ahead:
        """Logits of the next tokens, each head's of one."""
        rows: list[list[Tensor]] = [[] for _ in ends]
        for head in range(max((depth for _, _, depth in ends), default=0)):
            places = [place for place, (_, _, depth) in enumerate(ends) if depth > head]
            states = torch.stack([sequences.cache.of(ends[place][0]).outputs[()] for place in places])
            for place, row in zip(places, self.logits(states, head), strict=True):
                rows[place].append(row)
        return Ahead([torch.stack(logits) for logits in rows])

    def recorded_ahead(
        self, depth: int, anchors: Tensor, ends: Tensor, feed: Callable[[int], RecordedFeed]
    ) -> RecordedAhead:
        """As `ahead`."""
        return RecordedAhead(torch.stack([self.logits(ends, head) for head in range(depth)], 1))

    def _scores(self, hidden: Tensor, head: int) -> Tensor:
        """Logits [n, drafted tokens] float32 of the output layer, its own or all heads' one."""
        name = self._output_name(head)
        logits = (self._target.head if name is None else self._products[name])(hidden).float()
        is_cut = self._ids is not None and logits.shape[-1] > len(self._ids)
        return logits[:, self._ids] if is_cut else logits

    def _output_name(self, head: int) -> str | None:
        """The output layer of a head, its own or all heads'; None for the target's."""
        names = ("lm_head", "lm_heads.0") if self.draft.shares_output else (f"lm_heads.{head}",)
        return next((name for name in names if f"{name}.weight" in self.weights), None)


def sequences(draft: MedusaDraft, target: LM, _num_tokens: int) -> HeadSequences:
    """The heads' sequences, their weights loaded."""
    return HeadSequences([MedusaHead(draft, target)], target, draft.name, 1)
