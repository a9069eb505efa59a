"""transformers' forward in CUDA graphs, and as it is for what fits no graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_cli.lm.cache.contexts import ForwardInput, Moves
from specdec_cli.lm.door import Continuations, DraftForm, Draw, Tap
from specdec_cli.lm.forward.eager import EagerForward
from specdec_cli.lm.forward.forward import WithoutState, on_its_device
from specdec_cli.lm.forward.graph_inputs import MOST_READ
from specdec_cli.lm.forward.graphs import Graphs, GuessedGraph, ScoredGraph, most_fed


class RecordedForward(WithoutState):
    """Graphs over the cache of another forward, which runs what no graph is made for.

    Attributes:
        scored: the graph that has scored the rows of the latest call that fit one; None where none did.
        guessed: the graph that has guessed for all rows of the latest call, and does so again; None without one.
    """

    scored: ScoredGraph | None = None
    guessed: GuessedGraph | None = None
    can_guess = can_draw = can_branch = True
    graphs_obstacle: str | None = None

    def __init__(self, inner: EagerForward, max_context: int) -> None:
        self.shape = inner.shape
        self.spreads_nan = inner.spreads_nan
        self._inner = inner
        self._max_context = max_context
        self.allocate(0)

    @property
    def name(self) -> str:
        """`transformers, graphs`."""
        return f"{self._inner.name}, graphs"

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._inner.device

    @property
    def has_taken_cache(self) -> bool:
        """Whether a forward has run on a GPU."""
        return self._inner.has_taken_cache

    def allocate(self, num_blocks: int, num_prefix_states: int = 0) -> None:
        """Recreate the cache and drop all graphs, which hold the old addresses."""
        self._inner.allocate(num_blocks)
        self._num_blocks = num_blocks
        self._graphs = self._new_graphs()

    def _new_graphs(self) -> Graphs:
        inner, size = self._inner, self._inner.layouts.block_size
        return Graphs(inner.model, inner.cache, self._num_blocks, size, self._max_context, inner.hooks)

    def try_out(self) -> None:
        """Record a small forward over an empty cache, and forget it.

        Raises:
            RunError: the model's forward cannot be recorded.
        """
        try:
            self._graphs.try_out()
        finally:
            self.allocate(0)

    @on_its_device
    def score(self, feeds: Sequence[ForwardInput]) -> Tensor:
        """The wanted logits [sum of num_logits, V] float32. Rows that fit a graph are replayed, others run behind."""
        fitting = [feed for feed in feeds if self._graphs.takes(feed)]
        self.scored = None
        if not fitting:
            return self._inner.score(feeds)
        logits = self._graphs.score(fitting)
        self.scored = self._graphs.scored
        if len(fitting) == len(feeds):
            return logits
        others = [feed for feed in feeds if not self._graphs.takes(feed)]
        parts = [(fitting, logits), (others, self._inner.score(others))]
        by_feed = {
            id(feed): part
            for its, found in parts
            for feed, part in zip(its, torch.split(found, [feed.num_logits for feed in its]), strict=True)
        }
        return torch.cat([by_feed[id(feed)] for feed in feeds])

    @on_its_device
    def guess(
        self,
        feeds: Sequence[ForwardInput],
        counts: Sequence[int],
        draws: Sequence[Draw | None],
        num_tokens: int,
        form: DraftForm,
    ) -> Continuations:
        """Continuations in one graph. Of a prompt, all but as much as a step adds is fed before it."""
        known = [form.num_known(feed.num_tokens, feed.num_logits) for feed in feeds]
        lasting = most_fed(form, max(counts))
        most = max(lasting, MOST_READ)
        parts = [feed.cut(num - lasting) if num > most else [feed] for feed, num in zip(feeds, known, strict=True)]
        begins = [part[0] for part in parts if len(part) > 1]
        if begins:
            self._inner.score(begins)
        continuations = self._graphs.guess([part[-1] for part in parts], counts, draws, num_tokens, form)
        self.guessed = self._graphs.guessed
        return continuations

    @on_its_device
    def move(self, moves: Moves) -> None:
        """Copy keys and values from slots to others."""
        self._graphs.move(moves)

    def tap(self, taps: Sequence[Tap]) -> None:
        """Add hidden states to those that `score` gives to feeds that want them; drops the graphs, which lack them."""
        self._inner.tap(taps)
        self._graphs = self._new_graphs()

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [n, hidden]."""
        return self._inner.embed(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] float32 of final hidden states [n, hidden]."""
        return self._inner.head(hidden)

    def wipe(self, blocks: Sequence[int]) -> None:
        """Put zeros into blocks."""
        self._inner.wipe(blocks)
