"""A head's drafts in rounds that the device goes on with by itself (`lm.forward.device_rounds`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_cli.lm.cache.pending_tokens import PendingTokens
from specdec_cli.lm.forward.device_drafts import DecidedTokens, DraftedTokens, DraftOnDevice, send_tables
from specdec_cli.lm.forward.graph_inputs import NOTHING
from specdec_cli.lm.forward.recorded_rounds import NO_PLACE
from specdec_cli.lm.heads.head_graphs import HeadGraph, HeadInputs
from specdec_cli.lm.heads.head_module import HeadModule


class HeadOnDevice(DraftOnDevice):
    """A head's graph.

    Args:
        graph: the graph.
        modules: of the head.
        handles: of the sequences.
        num_slots: behind each text, for drafted nodes.
        first: what it has drafted.
    """

    def __init__(
        self,
        graph: HeadGraph,
        modules: Sequence[HeadModule],
        handles: Sequence[int],
        num_slots: int,
        first: DraftedTokens,
    ) -> None:
        nodes, _, *q = graph.outputs
        super().__init__(graph, graph.inputs, graph.choice, nodes, q, first)
        self._graph, self._modules, self._handles, self._num_slots = graph, modules, handles, num_slots
        self._sent: list[int] = []

    @property
    def _step(self) -> HeadInputs:
        return HeadInputs.views(self._graph.bucket, len(self._modules), self._graph.inputs)

    def take(self, decided: DecidedTokens) -> None:
        """Write the new slots, their states and the outputs before them."""
        graph, num = self._graph, decided.num_accepted + 1
        assert decided.states is not None, "a head reads states of its target"
        step = self._step
        column = torch.arange(graph.bucket.num_tokens, device=num.device)
        is_there = decided.lengths > 0
        is_new = (column < num[:, None]) & is_there[:, None]
        width = decided.states.shape[1]
        begin = 1 - self._modules[0].head.reads_before
        step.tokens[:, :width].copy_(decided.tokens[:, begin : begin + width])
        for m, places in enumerate(step.places):
            at = (decided.lengths - 1 - m)[:, None] + column
            places.copy_(torch.where(is_new & (at >= 0), at, NOTHING))
        step.last.copy_(torch.where(is_there, num - 1, NOTHING))
        step.begin.copy_(torch.where(is_there, decided.lengths + num - 1, NO_PLACE))
        step.anchors.copy_(decided.own)
        graph.states[:, :width].copy_(decided.states)
        graph.before.copy_(graph.outputs[1])

    def leave_out(self, row: int) -> None:
        """Write nothing where a sequence was that has been released."""
        self._step.leave_out(row)

    def reserve(self, lengths: Sequence[int | None]) -> bool:
        """Make room in every module's cache."""
        step, most = self._step, 0
        tables = []
        for m, module in enumerate(self._modules):
            wanted = {
                handle: length - 1 - m + self._num_slots
                for handle, length in zip(self._handles, lengths, strict=True)
                if length is not None
            }
            if not module.cache.has_room(wanted):
                return False
            for handle, num in wanted.items():
                module.cache.reserve(module.cache.of(handle), num)
            tables.append([module.cache.of(handle).blocks if handle in wanted else [] for handle in self._handles])
            most = max(most, *map(len, tables[-1]))
        if most > self._graph.bucket.num_blocks:
            return False
        sent = [len(blocks) for its in tables for blocks in its]
        if sent != self._sent:
            for table, blocks in zip(step.tables, tables, strict=True):
                send_tables(table, blocks)
            self._sent = sent
        return True

    def launch(self) -> DraftedTokens:
        """Draft a round, and copy the outputs that a later one overwrites."""
        self._graph.replay()
        num = len(self._handles)
        return DraftedTokens(PendingTokens(*self.nodes[:, :num].clone()), self._graph.outputs[1][:, :num].clone())

    def follow(self, drafted: DraftedTokens, texts: Sequence[list[int] | None], *, is_last: bool) -> None:
        """Note the slots that every module has taken, and its last output."""
        assert drafted.ends is not None, "a head leaves its last outputs"
        for i, (handle, text) in enumerate(zip(self._handles, texts, strict=True)):
            if text is None:
                continue
            for m, module in enumerate(self._modules):
                module.cache.of(handle).extend(text[m:], drafted.ends[m][i])
