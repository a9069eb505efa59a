"""Steps of a draft head, whatever its layer: its sequences (`head_sequences`) know no more of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from specdec_cli.lm.heads.head_layer import LayerFeed

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM


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
        recording_obstacle: why no CUDA graph can hold its forward; None where none is known before it is tried.
    """

    mask_token: int | None = None
    recording_obstacle: str | None = None

    def __init__(
        self, target: LM, weights: dict[str, Tensor], key_shape: tuple[int, int], value_shape: tuple[int, int]
    ) -> None:
        self._target, self.weights, self.vocab_size = target, weights, target.vocab_size
        self.key_shape, self.value_shape = key_shape, value_shape

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Input embeddings [n, hidden] by the target's table, of tokens on the host or [n] int64 on its device."""
        return self._target.embed(tokens)

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

    @abstractmethod
    def recycled(self, output: Tensor) -> Tensor:
        """The feature [n, hidden] that the next draft step reads, of the layer's output."""

    @abstractmethod
    def logits(self, output: Tensor) -> Tensor:
        """Logits [n, V] float32 of the layer's output; -inf where the head cannot draft a token."""
