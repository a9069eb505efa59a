"""The sequences of a head that drafts from its own outputs: on a GPU, their chains are one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specdec_cli.errors import RunError
from specdec_cli.lm.forward.forward import on_its_device
from specdec_cli.lm.forward.graph_inputs import MOST_TOKENS
from specdec_cli.lm.heads.head import Head
from specdec_cli.lm.heads.head_graphs import HeadChainRow, HeadGraphs
from specdec_cli.lm.heads.head_sequences import HeadSequences

if TYPE_CHECKING:
    from specdec_cli.lm.cache.unread import Unread
    from specdec_cli.lm.door import LM, Continuations


class ChainSequences(HeadSequences):
    """Runs a head over sequences; chains run in graphs where the target's own steps do.

    Args:
        heads: as for `HeadSequences`.
        target: likewise.
        name: likewise.
        num_taps: the target's states that the head reads at each position.

    Attributes:
        graphs_obstacle: why it records no graphs beside a target that does; None where it does, or where the target has
            none.
        last_guess: the tokens that `guess` gave last, for its caller to look at once they are read.

    Raises:
        RunError: graphs were asked for, and this head cannot be recorded.
    """

    def __init__(self, heads: Sequence[Head], target: LM, name: str, num_taps: int) -> None:
        self._graphs: HeadGraphs | None = None
        self.last_guess: Unread | None = None
        super().__init__(heads, target, name)
        self.graphs_obstacle: str | None = None
        if target.recording == "none":
            return
        try:
            self._graphs = self._tried_graphs(target, name, num_taps)
        except RunError as error:
            if target.recording == "required":
                raise
            self.graphs_obstacle = error.message

    @property
    def is_recorded(self) -> bool:
        """Whether `guess` drafts chains."""
        return self._graphs is not None

    def hold(
        self,
        num_blocks: int,
        num_seqs: int | None = None,
        extra_tokens: int | None = None,
        num_prefix_states: int | None = None,
    ) -> None:
        """Recreate the caches with so many blocks, and drop all graphs, which hold the old addresses."""
        if self._graphs is not None:
            self._graphs.drop()
        super().hold(num_blocks, num_seqs, extra_tokens, num_prefix_states)

    @on_its_device
    @torch.inference_mode()
    def guess(self, rows: Sequence[HeadChainRow], num_tokens: int) -> Continuations:
        """Take the target's states of some sequences and draft a chain behind each, in one graph.

        More states than a graph is made for are taken before it.

        Args:
            rows: the sequences; of each there are new states, or the output that a first guess follows from.
            num_tokens: V, the real vocabulary; no token is beyond it.

        Raises:
            RunError: too few blocks are free, or the head cannot be recorded.
        """
        assert self._graphs is not None, "a head drafts in graphs once it was recorded"
        news = [self._only_new(row) for row in rows]
        for row in news:
            for m, module in enumerate(self.modules):
                held = module.cache.of(row.handle)
                held.forget_nodes()
                module.cache.publish(held)
                module.cache.reserve(held, len(row.context) - 2 - m + row.num_tokens)
        found, ends = self._graphs.guess(news, num_tokens)
        for i, row in enumerate(news):
            for m, (module, its) in enumerate(zip(self.modules, ends, strict=True)):
                module.cache.of(row.handle).extend(row.context[m:], its[i])
        self.last_guess = found.unread
        return found

    @on_its_device
    def _tried_graphs(self, target: LM, name: str, num_taps: int) -> HeadGraphs:
        """Graphs, of which one was recorded on trial."""
        like = target.embed([0])
        graphs = HeadGraphs(self.modules, name, (num_taps, like.shape[-1]), like)
        graphs.try_out()
        graphs.drop()
        return graphs

    def _only_new(self, row: HeadChainRow) -> HeadChainRow:
        """A row with the states that its sequence lacks; those of a long text are taken at once."""
        if row.features is None or self.num_kept(row.handle) == len(row.context) - 1:
            return replace(row, features=None)
        first = len(row.context) - 1 - len(row.features)
        assert first == self.num_kept(row.handle), "each kept position's features come once"
        if len(row.features) <= MOST_TOKENS:
            return row
        self.feed([(row.handle, row.context, row.features)])
        return replace(row, features=None)
