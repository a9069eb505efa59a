"""Steps of a draft head, whatever its layers: its sequences (`head_sequences`) know no more of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.lm.heads.head_layer import LayerFeed
from specdec_cli.lm.heads.head_tensors import read_head_tensors
from specdec_cli.lm.heads.published import PublishedDraft
from specdec_cli.lm.heads.stacks import product_of, stack_of
from specdec_cli.transfer import sent

if TYPE_CHECKING:
    from typing import Any

    from specdec_cli.lm.door import LM
    from specdec_cli.lm.heads.draft_sequences import Ahead, RecordedAhead
    from specdec_cli.lm.heads.head_sequences import HeadSequences
    from specdec_cli.lm.heads.layer_stack import BlockLayer, LayerStack
    from specdec_cli.lm.heads.recorded_feed import RecordedFeed


class Head(ABC):
    """A draft head on a target's hidden states.

    Args:
        target: the loaded target, whose embedding and output layer it may borrow.
        weights: its own tensors.
        key_shape: key heads, and numbers in each, that its layer keeps of a slot.
        value_shape: the same of values.

    Attributes:
        weights: its own tensors.
        vocab_size: V, the width of its logits.
        mask_token: stands for tokens that are not drafted yet, and `recycled` gives its feature, whatever the output;
            None where each drafted token is read.
        is_one_pass: whether a graph drafts all tokens by `recorded_ahead`, not one after another.
        records_trees: whether a graph drafts trees, not chains alone.
        recording_obstacle: why no CUDA graph can hold its forward; None where none is known before it is tried.
        reads_before: slot t pairs the token at t with the states of t - 1, not the token at t + 1 with those of t.
        most_tokens: that it drafts one after another; None drafts as many as are wanted.
    """

    mask_token: int | None = None
    is_one_pass: bool = False
    records_trees: bool = True
    recording_obstacle: str | None = None
    reads_before: bool = False
    most_tokens: int | None = None

    def __init__(
        self, target: LM, weights: dict[str, Tensor], key_shape: tuple[int, int], value_shape: tuple[int, int]
    ) -> None:
        self._target, self.weights, self.vocab_size = target, weights, target.vocab_size
        self.key_shape, self.value_shape = key_shape, value_shape

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Input embeddings [n, hidden] by its own table, else the target's, of tokens on the host or [n] int64."""
        table = self.weights.get("embed_tokens.weight")
        if table is None:
            return self._target.embed(tokens)
        return functional.embedding(sent(tokens, torch.int64, table.device), table)

    def mix(self, features: Tensor) -> Tensor:
        """One feature [n, hidden] of the target's states [n, taps, target hidden]: those of the only tap."""
        return features[:, 0]

    @abstractmethod
    def run(self, embedded: Tensor, feature: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """The layer's output [n, hidden] of new slots, sequence after sequence.

        Args:
            embedded: tokens' embeddings [n, hidden].
            feature: what stands for the target's states before each [n, hidden].
            positions: [n] int64, for the rotary embedding.
            feeds: the sequences.
        """

    def recycled(self, output: Tensor) -> Tensor:
        """The feature [n, hidden] that the next draft step reads, of the layer's output: the output itself."""
        return output

    @abstractmethod
    def logits(self, output: Tensor) -> Tensor:
        """Logits [n, V] float32 of the layer's output; -inf where the head cannot draft a token."""

    def num_rows(self, depth: int) -> int:
        """New slots that drafting so many tokens one after another takes behind the kept ones."""
        return depth - 1

    def ahead(self, sequences: HeadSequences, ends: Sequence[tuple[int, int, int]]) -> Ahead:
        """All next tokens' logits from one pass, of a head that drafts so.

        Args:
            sequences: that it runs over.
            ends: of each sequence its handle, whose features were fed, its last token, and how many tokens are wanted.

        Raises:
            RunError: too few blocks are free.
        """
        raise NotImplementedError

    def recorded_ahead(
        self, depth: int, anchors: Tensor, ends: Tensor, feed: Callable[[int], RecordedFeed]
    ) -> RecordedAhead:
        """All next tokens' logits from one pass, in a CUDA graph.

        Args:
            depth: tokens that are wanted.
            anchors: last token of each context [B] int64.
            ends: output of the last kept slot of each sequence [B, hidden].
            feed: so many new slots behind the kept ones of each sequence.
        """
        raise NotImplementedError


class PublishedHead(Head):
    """A head of a published folder: its tensors, checked, and a stack of layers.

    Args:
        draft: what its folder says.
        target: the loaded target, in whose dtype it computes.
        layer: transformers configuration of its layers.
        joins: the product that makes one feature of the target's states.
        block_layers: how each layer attends; None has each slot see those before it.

    Attributes:
        draft: what its folder says.
        layers: the stack.

    Raises:
        RunError: weights that cannot be read.
        UsageError: weights that are missing or of other shapes, or a draft for another target.
    """

    def __init__(
        self,
        draft: PublishedDraft,
        target: LM,
        layer: Any,
        joins: str,
        block_layers: Sequence[BlockLayer] | None = None,
    ) -> None:
        self.draft, weights = draft, checked_tensors(draft, target)
        self.layers = self.stack(layer, weights, target, block_layers)
        super().__init__(target, weights, self.layers.key_shape, self.layers.value_shape)
        self._join = product_of(weights, joins)
        self._ids = draft.target_ids(weights, target.name, target.vocab_size)
        self._head = product_of(weights, "lm_head") if "lm_head.weight" in weights else None

    def stack(
        self, layer: Any, weights: dict[str, Tensor], target: LM, block_layers: Sequence[BlockLayer] | None
    ) -> LayerStack:
        """Its layers, as this machine runs them fastest; arguments as for `stack_of`."""
        return stack_of(layer, weights, target, block_layers)

    def norm(self, hidden: Tensor, name: str) -> Tensor:
        """RMS norm by one of its weights, `name.weight`."""
        return self.layers.norm(hidden, self.weights[f"{name}.weight"])

    def scores(self, normalized: Tensor) -> Tensor:
        """Logits [n, drafted tokens] float32 by its own output layer, else the target's."""
        return (self._head or self._target.head)(normalized).float()

    def spread(self, logits: Tensor) -> Tensor:
        """Logits [n, V] of the target's tokens."""
        return spread(logits, self._ids, self.vocab_size)


def checked_tensors(draft: PublishedDraft, target: LM) -> dict[str, Tensor]:
    """The tensors of a published draft that is loaded for a target, in its dtype.

    Raises:
        RunError: weights that cannot be read.
        UsageError: weights that are missing or of other shapes, or a draft for another target.
    """
    draft.check_fits(target.name, target.embed([0]).shape[-1], target.vocab_size)
    weights = read_head_tensors(draft, target.dtype, target.device)
    draft.check_shapes({name: tuple(value.shape) for name, value in weights.items()})
    return weights


def spread(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits [n, V] of the target's tokens: -inf for those that the draft has not.

    Args:
        logits: [n, drafted tokens].
        ids: the target's id of each drafted token; None where all are drafted by the target's ids.
        vocab_size: V.
    """
    if ids is None:
        return logits
    wide = logits.new_full((len(logits), vocab_size), -torch.inf)
    wide[:, ids] = logits
    return wide
