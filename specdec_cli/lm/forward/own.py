"""The forward of our own decoder (`lm.llama`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec_cli.lm.cache.contexts import ForwardInput, Moves
from specdec_cli.lm.cache.layout import KEY_GRAIN, Layout, Layouts
from specdec_cli.lm.cache.snapshots import Snapshots
from specdec_cli.lm.door import Continuations, Draw, Tap
from specdec_cli.lm.forward.forward import CacheShape, score_in_turns
from specdec_cli.lm.llama.llama import LlamaDecoder


class OwnForward:
    """Packed forwards in compiled code. A row has the same bits in any company as it is.

    Args:
        decoder: of the model.
        layouts: of its forwards.
    """

    name = "own"
    can_guess = can_draw = True
    spreads_nan = False
    has_taken_cache = False
    graphs_obstacle: str | None = None

    def __init__(self, decoder: LlamaDecoder, layouts: Layouts) -> None:
        self.decoder = decoder
        self.shape = CacheShape(decoder.kv_bytes_per_token, decoder.vocab_size)
        self.layouts = layouts

    def allocate(self, num_blocks: int, num_prefix_states: int = 0) -> None:
        """Recreate the cache."""
        self.decoder.allocate(num_blocks * self.layouts.block_size + KEY_GRAIN, self.layouts.block_size)

    def score(self, feeds: Sequence[ForwardInput]) -> Tensor:
        """The wanted logits [sum of num_logits, V] float32."""
        return score_in_turns(self.layouts, feeds, self.run, self.shape.vocab_size)

    def run(self, layout: Layout) -> Tensor:
        """One forward; logits [len(wanted), V] float32."""
        return self.decoder.forward(layout)

    def guess(
        self, feeds: Sequence[ForwardInput], counts: Sequence[int], draws: Sequence[Draw | None], num_tokens: int
    ) -> Continuations:
        """Continuations in one call."""
        return self.decoder.guess(self.layouts.of(feeds), counts, draws, num_tokens)

    def move_states(self, snapshots: Snapshots, moves: Moves) -> None:
        """No model with a state runs here."""
        raise AssertionError("a model without a state keeps none")

    def restore(self, slot: int, snapshots: Snapshots, length: int) -> None:
        """No model with a state runs here."""
        raise AssertionError("a model without a state has no snapshots")

    def keep(self, slot: int, snapshots: Snapshots, length: int) -> None:
        """No model with a state runs here."""
        raise AssertionError("a model without a state has no snapshots")

    def move(self, moves: Moves) -> None:
        """Copy keys and values from slots to others."""
        self.decoder.move(moves)

    def tap(self, taps: Sequence[Tap]) -> None:
        """Add hidden states to those that `score` gives to feeds that want them."""
        self.decoder.tap(taps)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [n, hidden]."""
        return self.decoder.embed(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] float32 of final hidden states [n, hidden]."""
        return self.decoder.head(hidden)

    def wipe(self, blocks: Sequence[int]) -> None:
        """Nothing: attention reads a row's own keys alone."""
