"""The protocol of a model's forward pass and its cache of keys and values. It has three implementations.

`LlamaDecoder` is our own in C++, `EagerForward` transformers' forward, `RecordedForward` the same as CUDA graphs;
`lm.decoders` chooses one for a model. Callers hand over feeds: which tokens of each row the cache lacks, the blocks
they belong in, and how many logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from specdec_cli.lm.cache.contexts import ForwardInput, Moves
from specdec_cli.lm.cache.snapshots import Snapshots
from specdec_cli.lm.door import Continuations, DraftForm, Draw, Tap

if TYPE_CHECKING:
    from specdec_cli.lm.forward.graphs import GuessedGraph, ScoredGraph


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The entries that a model writes into its cache, and the width of its logits.

    Args:
        kv_bytes_per_token: keys and values of one token in all layers that keep some.
        vocab_size: width of the logits.
        state_bytes: what recurrent layers carry from a token to the next; 0 without such layers.
        prefix_state_bytes: of a snapshot of it, with all inputs that convolutions look back at.
    """

    kv_bytes_per_token: int
    vocab_size: int
    state_bytes: int = 0
    prefix_state_bytes: int = 0


class Forward(Protocol):
    """A loaded model's forward and its keys and values.

    Attributes:
        shape: what it keeps of a token, and the width of its logits.
        can_guess: `guess` continues rows with the likeliest tokens.
        can_draw: `guess` draws tokens, too.
        can_branch: `guess` gives trees, too, and tokens of one pass.
        spreads_nan: attention reads slots behind a row's own keys, masked. A NaN there reaches other rows, so the
            blocks of a row without a distribution must be wiped.
        graphs_obstacle: why `auto` records no graphs of a GPU's steps; None where it does, or where it does not apply.
        scored: the graph that has scored all rows of the latest call; None without one.
        guessed: the graph that has guessed for all rows of the latest call, and does so again; None without one.
    """

    shape: CacheShape
    can_guess: bool
    can_draw: bool
    can_branch: bool
    spreads_nan: bool
    graphs_obstacle: str | None
    scored: ScoredGraph | None
    guessed: GuessedGraph | None

    @property
    def name(self) -> str:
        """`own`, `transformers`, or `transformers, graphs`."""
        ...

    @property
    def has_taken_cache(self) -> bool:
        """Whether `allocate` has taken all its memory: a GPU's in the first forward, a CPU's only as it is written."""
        ...

    def allocate(self, num_blocks: int, num_prefix_states: int = 0) -> None:
        """Recreate the cache with so many blocks, and snapshots of states. The contents of the old one are lost."""
        ...

    def move_states(self, snapshots: Snapshots, moves: Moves) -> None:
        """Copy the states that a sequence keeps of some of its places to others, in order."""
        ...

    def restore(self, slot: int, snapshots: Snapshots, length: int) -> None:
        """Give a sequence that begins with so many cached tokens the states of their snapshot."""
        ...

    def keep(self, slot: int, snapshots: Snapshots, length: int) -> None:
        """Make a snapshot of the states that a sequence keeps after so many tokens."""
        ...

    def score(self, feeds: Sequence[ForwardInput]) -> Tensor:
        """Feed tokens and file their keys and values in the feeds' blocks.

        Returns:
            The wanted logits [sum of num_logits, V] float32, feed by feed, which the caller may change.
        """
        ...

    def guess(
        self,
        feeds: Sequence[ForwardInput],
        counts: Sequence[int],
        draws: Sequence[Draw | None],
        num_tokens: int,
        form: DraftForm,
    ) -> Continuations | None:
        """Continue sequences in one call.

        Args:
            feeds: contexts, and behind them masks, or any tokens in the places of those that are read; `num_logits`
                counts these and the context's last token.
            counts: tokens to find for each one after another, at least 1.
            draws: how those of each are drawn; None takes the likeliest.
            num_tokens: of these first tokens of the vocabulary.
            form: a chain, unless it `can_branch`.

        Returns:
            A continuation for each; None where this many tokens take another way, and nothing was fed.
        """
        ...

    def move(self, moves: Moves) -> None:
        """Copy tokens' keys and values from slots to others, in order: no copy overwrites what a later one reads."""
        ...

    def tap(self, taps: Sequence[Tap]) -> None:
        """Add hidden states of layers that exist to those that `score` gives to feeds that want them."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [n, hidden] of tokens [n] int64."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] float32 of final hidden states [n, hidden]."""
        ...

    def wipe(self, blocks: Sequence[int]) -> None:
        """Make blocks safe to be read, masked, by other rows after numbers that are none were filed in them."""
        ...


class WithoutGraphs:
    """Base of forwards that are not recorded."""

    scored: ScoredGraph | None = None
    guessed: GuessedGraph | None = None


class WithoutState:
    """Base of forwards that run no model with a state."""

    def move_states(self, snapshots: Snapshots, moves: Moves) -> None:
        """No model with a state runs here."""
        raise AssertionError("a model without a state keeps none")

    def restore(self, slot: int, snapshots: Snapshots, length: int) -> None:
        """No model with a state runs here."""
        raise AssertionError("a model without a state has no snapshots")

    def keep(self, slot: int, snapshots: Snapshots, length: int) -> None:
        """No model with a state runs here."""
        raise AssertionError("a model without a state has no snapshots")


_Method = TypeVar("_Method", bound=Callable[..., Any])


def on_its_device(method: _Method) -> _Method:
    """A method that may launch Triton's kernels or record events, which belong to whatever GPU is the current one."""

    @wraps(method)
    def run(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.device.type != "cuda":
            return method(self, *arguments, **named)
        with torch.cuda.device(self.device):
            return method(self, *arguments, **named)

    return cast("_Method", run)
