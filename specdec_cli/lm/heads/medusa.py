"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): each guesses one further token from the same final hidden state.

Head i, counted from 0, reads the state behind the target's final norm at position t and predicts the token at
t + 2 + i, as the target itself predicts t + 1. It adds SiLU(W h + b) to the state h, once for every residual block, and
has an output layer of its own. Heads keep no keys and values and know no positions: a sequence is its last state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.lm.heads.draft_vocabulary import spread, target_ids
from specdec_cli.lm.heads.head_shapes import check_shapes
from specdec_cli.lm.heads.head_tensors import read_head_tensors
from specdec_cli.lm.heads.medusa_files import MedusaConfig
from specdec_cli.lm.heads.stacks import product_of

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM


class MedusaHeads:
    """A set of Medusa heads.

    Args:
        config: of the heads.
        target: the loaded target, in whose dtype they compute.

    Attributes:
        config: of the heads.

    Raises:
        RunError: weights that cannot be read.
        UsageError: weights that are missing or of other shapes, or heads for another target.
    """

    def __init__(self, config: MedusaConfig, target: LM) -> None:
        config.check_fits(target.name, target.embed([0]).shape[-1], target.vocab_size)
        self.weights = read_head_tensors(config, target.dtype, target.device)
        check_shapes(config, {name: tuple(value.shape) for name, value in self.weights.items()})
        self.config, self._target = config, target
        blocks = [f"blocks.{i}.layers.{j}" for i in range(config.num_heads) for j in range(config.num_layers)]
        outputs = {self._output_name(i) for i in range(config.num_heads)}
        self._products = {name: product_of(self.weights, name) for name in (*blocks, *outputs) if name is not None}
        self._ids = target_ids(config, self.weights, target.name, target.vocab_size)

    @property
    def num_parameters(self) -> int:
        """Numbers in all heads."""
        return sum(one.numel() for one in self.weights.values())

    @property
    def num_bytes(self) -> int:
        """Memory of all heads."""
        return sum(one.nbytes for one in self.weights.values())

    def logits(self, states: Tensor, head: int) -> Tensor:
        """Logits [n, V] float32 of one head's token; -inf where it cannot draft one.

        Args:
            states: the target's final hidden states [n, hidden].
            head: its number, counted from 0.
        """
        hidden = states
        for layer in range(self.config.num_layers):
            found = self._products[f"blocks.{head}.layers.{layer}"](hidden)
            hidden = hidden + functional.silu(found.to(hidden.dtype))
        return spread(self._output(hidden, head), self._ids, self._target.vocab_size)

    def _output(self, hidden: Tensor, head: int) -> Tensor:
        """Logits [n, drafted tokens] float32 of the output layer, its own or all heads' one."""
        name = self._output_name(head)
        logits = (self._target.head if name is None else self._products[name])(hidden).float()
        is_cut = self._ids is not None and logits.shape[-1] > len(self._ids)
        return logits[:, self._ids] if is_cut else logits

    def _output_name(self, head: int) -> str | None:
        """The output layer of a head, its own or all heads'; None for the target's."""
        names = ("lm_head", "lm_heads.0") if self.config.shares_output else (f"lm_heads.{head}",)
        return next((name for name in names if f"{name}.weight" in self.weights), None)


class MedusaSequences:
    """The last hidden state of each sequence, from which heads guess.

    Args:
        heads: loaded.
    """

    def __init__(self, heads: MedusaHeads) -> None:
        self.heads = heads
        self._states: dict[int, Tensor] = {}

    @property
    def most_tokens(self) -> int:
        """As many as there are heads."""
        return self.heads.config.num_heads

    @property
    def sizes(self) -> tuple[int, int]:
        """Parameters of the heads, and bytes of these and of the states."""
        held = sum(one.nbytes for one in self._states.values())
        return self.heads.num_parameters, self.heads.num_bytes + held

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """All positions but the last kept one, from whose state heads guess."""
        return max(len(context) - 2, 0)

    def release(self, handle: int) -> None:
        """Forget a sequence; unknown ones are fine."""
        self._states.pop(handle, None)

    def feed(self, handle: int, features: Tensor) -> None:
        """Take the states [n, 1, hidden] of positions that were kept; the last one counts."""
        self._states[handle] = features[-1, 0].clone()

    def can_draft(self, handle: int) -> bool:
        """Whether the state is there that guesses follow from."""
        return handle in self._states

    @torch.inference_mode()
    def logits(self, handles: Sequence[int], depths: Sequence[int]) -> list[Tensor]:
        """Logits [depth, V] float32 of each sequence's next tokens.

        Args:
            handles: the sequences, whose features were fed.
            depths: of each, how many tokens, at most as many as there are heads.
        """
        found: list[list[Tensor]] = [[] for _ in handles]
        for head in range(max(depths, default=0)):
            places = [place for place, depth in enumerate(depths) if depth > head]
            states = torch.stack([self._states[handles[place]] for place in places])
            for place, logits in zip(places, self.heads.logits(states, head), strict=True):
                found[place].append(logits)
        return [torch.stack(its) for its in found]
