"""PARD-2 (arXiv 2605.08632): a language model whose tokens come with the target's states of the position before.

Row t reads the token at position t and the projected states of position t - 1, zeros at the text's beginning. Mask rows
behind the last token repeat its states. So the rows before the last token are what the cache keeps; the last token and
the masks are read again in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.lm.heads.head import Head
from specdec_cli.lm.heads.head_layer import LayerFeed
from specdec_cli.lm.heads.head_sequences import HeadSequences
from specdec_cli.lm.heads.head_shapes import check_shapes
from specdec_cli.lm.heads.head_tensors import read_head_tensors
from specdec_cli.lm.heads.layer_stack import positions_of
from specdec_cli.lm.heads.pard2_files import Pard2Config
from specdec_cli.lm.heads.stacks import product_of, stack_of

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM


class Pard2Head(Head):
    """A PARD-2 draft.

    Args:
        config: of the draft.
        target: the loaded target, in whose dtype it computes.

    Raises:
        RunError: weights that cannot be read.
        UsageError: weights that are missing or of other shapes, or a draft for another target.
    """

    def __init__(self, config: Pard2Config, target: LM) -> None:
        config.check_fits(target.name, target.embed([0]).shape[-1], target.vocab_size)
        weights = read_head_tensors(config, target.dtype, target.device)
        check_shapes(config, {name: tuple(value.shape) for name, value in weights.items()})
        self._stack = stack_of(config.layer, weights, target)
        super().__init__(target, weights, self._stack.key_shape, self._stack.key_shape)
        self.vocab_size = int(config.layer.vocab_size)
        self.config, self._project = config, product_of(weights, "target_proj")
        self._head = product_of(weights, "lm_head") if "lm_head.weight" in weights else None

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Input embeddings [n, hidden] by its own table."""
        table = self.weights["embed_tokens.weight"]
        return functional.embedding(torch.as_tensor(tokens, dtype=torch.long, device=table.device), table)

    def mix(self, features: Tensor) -> Tensor:
        """The projected states [n, hidden], scaled."""
        return self._project(features.flatten(1)).to(features.dtype) * self.config.scale

    def run(self, embedded: Tensor, feature: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """The last layer's output of rows."""
        return self._stack.run(embedded + feature, positions, feeds)

    def recycled(self, output: Tensor) -> Tensor:
        """The output itself: no row reads another's."""
        return output

    def logits(self, output: Tensor) -> Tensor:
        """Logits [n, V of the draft] float32 of the last layer's output."""
        normalized = self._stack.norm(output, self.weights["norm.weight"])
        if self._head is None:
            return functional.linear(normalized, self.weights["embed_tokens.weight"]).float()
        return self._head(normalized).float()


class Pard2Sequences(HeadSequences):
    """Runs a PARD-2 draft over sequences, which share no cached prefixes.

    Args:
        head: loaded.
        target: as for `HeadSequences`.
        name: of the draft, for messages.
    """

    def __init__(self, head: Pard2Head, target: LM, name: str) -> None:
        super().__init__([head], target, name)
        self._head = head
        self.vocab_size = head.vocab_size

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Nothing: the first new row would need the states of the last cached position."""
        return 0

    def _extend(self, handle: int, context: Sequence[int], features: Tensor) -> None:
        """Take further rows, each with the states of the position before it."""
        held = self.cache.of(handle)
        first, mixed = held.num_kept, self._head.mix(features)
        before = held.outputs.get((), torch.zeros_like(mixed[0]))
        shifted = torch.cat([before[None], mixed[:-1]])
        end = first + len(features)
        feed = LayerFeed(self.cache.keys, self.cache.values, held.slots, range(first, end), end)
        positions = positions_of([feed], features.device)
        self._head.run(self._head.embed(context[first:end]), shifted, positions, [feed])
        held.outputs[()] = mixed[-1]
        held.tokens += context[len(held.tokens) : end + 1]

    @torch.inference_mode()
    def logits_behind(self, ends: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Logits [depth, V of the draft] float32 behind each context.

        Args:
            ends: of each sequence its handle, whose features were fed, its last token, and how many tokens are wanted.

        Raises:
            RunError: too few blocks are free.
        """
        tokens, features, feeds = [], [], []
        for handle, token, depth in ends:
            held = self.cache.of(handle)
            first, end = held.num_kept, held.num_kept + depth
            self.cache.reserve(held, end)
            feeds.append(LayerFeed(self.cache.keys, self.cache.values, held.slots, range(first, end), end))
            tokens += [token, *[self._head.config.mask_token] * (depth - 1)]
            features.append(held.outputs[()].expand(depth, -1))
        embedded = self._head.embed(tokens)
        output = self._head.run(embedded, torch.cat(features), positions_of(feeds, embedded.device), feeds)
        return list(torch.split(self._head.logits(output), [depth for _, _, depth in ends]))
