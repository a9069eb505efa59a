"""A draft's side of rounds that the device goes on with by itself (`device_rounds`): what any has, and a draft model's.

Letters: B sequences, N drafted nodes of each, D their depth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.cache.contexts import Contexts
from specdec_cli.lm.cache.pending_tokens import PendingTokens
from specdec_cli.lm.door import CHAIN
from specdec_cli.lm.forward.graph_draws import NUM_SETTINGS, ChoiceInputs
from specdec_cli.lm.forward.graph_inputs import NOTHING, GraphInputs, fill
from specdec_cli.lm.forward.graphs import ForwardGraph, GuessedGraph
from specdec_cli.lm.forward.recorded_rounds import num_slots_of


@dataclass(frozen=True, slots=True)
class DecidedTokens:
    """Tokens that a round has decided on the device.

    Args:
        lengths: tokens of each text before the round [B] int64; 0 where there is no sequence.
        num_accepted: drafted nodes that stand [B] int64.
        tokens: the last token before the round, those of the nodes that stand, and the target's own [B, D + 2] int64;
            what stands behind these means nothing.
        states: hidden states [B, D + 1, taps, hidden] of all of them but the own one; None without taps.
    """

    lengths: Tensor
    num_accepted: Tensor
    tokens: Tensor
    states: Tensor | None

    @property
    def own(self) -> Tensor:
        """The target's own token [B]."""
        return self.tokens.gather(1, (self.num_accepted + 1)[:, None])[:, 0]


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """Tokens that a round has drafted.

    Args:
        unread: the nodes of n sequences.
        ends: each module's output at the last position of each sequence [M, n, hidden], of a head.
    """

    unread: PendingTokens
    ends: Tensor | None = None


class DraftOnDevice(ABC):
    """A recorded draft of n sequences that has run, and runs again from what the device decides.

    Args:
        graph: what was recorded.
        inputs: its integers, which the host or `take` writes.
        choice: how its tokens are chosen.
        nodes: the tokens of its nodes [1, B, N], or [2, B, N] with their paths; overwritten by each replay.
        q: as `RecordedDraft` has it; overwritten as well.
        first: what it has drafted already.
    """

    def __init__(
        self,
        graph: Any,
        inputs: Tensor,
        choice: ChoiceInputs,
        nodes: Tensor,
        q: Sequence[Tensor],
        first: DraftedTokens,
    ) -> None:
        self.graph, self.inputs, self._choice, self.nodes, self._q, self.first = graph, inputs, choice, nodes, q, first
        self._num_filled = graph.num_filled

    @property
    def depth(self) -> int:
        """D, however deep a draft was asked for."""
        return self._choice.noise.shape[1]

    @property
    def is_drawn(self) -> bool:
        """Whether nodes may be drawn by chance."""
        return bool(self._q)

    @property
    def q(self) -> Tensor | None:
        """Distributions that the nodes were drawn from [B, N, V] float32; None where none was drawn."""
        return torch.take_along_dim(self._q[0], self._q[1][:, :, None], 1) if self._q else None

    @property
    def order(self) -> Tensor | None:
        """The number of each node in the shape that it was drawn in [B, N]; None where all numbers are these."""
        return self._q[2] if len(self._q) > 2 else None

    def draw(self, uniforms: Tensor, noise: Tensor) -> None:
        """Write the chance that the next round draws by.

        Args:
            uniforms: a number for each node [B, N] float64; [B, 0] where none is drawn by a number.
            noise: of each depth and the one behind the last [B, D + 1, V] float64; empty where none is needed.
        """
        if uniforms.shape[1]:
            self._choice.numbers[:, NUM_SETTINGS:].copy_(uniforms)
        if self._choice.kind.has_noise:
            self._choice.noise.copy_(noise[:, : self._choice.noise.shape[1], : self._choice.num_tokens])

    @property
    def is_left_alone(self) -> bool:
        """Whether the graph was given no other inputs since."""
        return bool(self.graph.num_filled == self._num_filled)

    @abstractmethod
    def take(self, decided: DecidedTokens) -> None:
        """Write the inputs of the next round, on the device alone: a graph records it."""

    @abstractmethod
    def leave_out(self, row: int) -> None:
        """Write nothing where a sequence was that has been released."""

    @abstractmethod
    def reserve(self, lengths: Sequence[int | None]) -> bool:
        """Make room for a round behind texts of so many tokens at most; False where there is none.

        Args:
            lengths: of each; None for one that was released.
        """

    @abstractmethod
    def launch(self) -> DraftedTokens:
        """Draft a round."""

    @abstractmethod
    def follow(self, drafted: DraftedTokens, texts: Sequence[list[int] | None], *, is_last: bool) -> None:
        """Bring the books to what the caches hold after a round.

        Args:
            drafted: in the round.
            texts: of each sequence before the round; None for one that was released.
            is_last: no further round was launched.
        """


class ModelOnDevice(DraftOnDevice):
    """A draft model's graph.

    Args:
        guessed: the graph.
        mask: stands for tokens that come from one pass.
        contexts: of the draft model.
        handles: of the sequences.
        unread: the guess that it has made.
    """

    def __init__(
        self, guessed: GuessedGraph, contexts: Contexts, handles: Sequence[int], unread: PendingTokens
    ) -> None:
        graph, (nodes, *q) = guessed.graph, guessed.graph.outputs
        super().__init__(graph, graph.inputs, guessed.choice, nodes, q, DraftedTokens(unread))
        self._guessed, self._contexts, self._handles = guessed, contexts, handles
        self._tables = BlockTables(contexts, handles, graph)

    def take(self, decided: DecidedTokens) -> None:
        """Write the tokens that the draft's cache lacks, and masks behind them."""
        form, depth = self._guessed.form, self._guessed.depth
        step = GraphInputs.views(self.graph.bucket, self.inputs)
        first, num = decided.lengths, decided.num_accepted + 1
        if form == CHAIN:  # its tokens are cached but for the last drafted one and the own one
            first, num = first + num - 2, torch.full_like(num, 2)
        column = torch.arange(self.graph.bucket.num_tokens, device=num.device)
        place = (first - decided.lengths + 1)[:, None] + column
        tokens = decided.tokens.gather(1, place.clamp(max=decided.tokens.shape[1] - 1))
        num_fed = num
        if form.mask is not None:
            tokens = torch.where(column < num[:, None], tokens, form.mask)
            num_fed = num + depth - 1
        is_fed = (column < num_fed[:, None]) & (decided.lengths > 0)[:, None]
        step.tokens.copy_(torch.where(is_fed, tokens, 0))
        step.positions.copy_(torch.where(is_fed, first[:, None] + column, NOTHING))
        step.more[: len(num)].copy_(num - 1)

    def leave_out(self, row: int) -> None:
        """Write nothing where a sequence was that has been released."""
        GraphInputs.views(self.graph.bucket, self.inputs).leave_out(row)

    def reserve(self, lengths: Sequence[int | None]) -> bool:
        """Make room in the draft's cache."""
        form, depth = self._guessed.form, self._guessed.depth
        num = depth - 1 if form.tree is None or form.mask is not None else num_slots_of(form.tree, depth)
        return self._tables.reserve([None if length is None else length + num for length in lengths])

    def launch(self) -> DraftedTokens:
        """Draft a round."""
        self.graph.replay()
        return DraftedTokens(PendingTokens(*self.nodes[:, : len(self._handles)].clone()))

    def follow(self, drafted: DraftedTokens, texts: Sequence[list[int] | None], *, is_last: bool) -> None:
        """Note the text, and behind the last round's the drafted tokens of a chain."""
        for i, (handle, text) in enumerate(zip(self._handles, texts, strict=True)):
            if text is None:
                continue
            cached = [*text]
            if is_last and self._guessed.form == CHAIN:
                unread = drafted.unread
                cached += unread.known(unread.stand_ins(i, self._guessed.depth - 1))
            self._contexts.follow(handle, cached, is_last=is_last)


class BlockTables:
    """The blocks of sequences, as a graph knows them."""

    def __init__(self, contexts: Contexts, handles: Sequence[int], graph: ForwardGraph) -> None:
        self._contexts, self._handles, self._graph = contexts, handles, graph
        self._sent: list[int] = []

    def reserve(self, lengths: Sequence[int | None]) -> bool:
        """Have blocks for so many tokens of each, and tell the graph where they are; False where there are too few.

        Those of a sequence without a length are taken from the graph.
        """
        bucket, inputs = self._graph.bucket, self._graph.inputs
        wanted = {handle: num for handle, num in zip(self._handles, lengths, strict=True) if num is not None}
        if not self._contexts.reserve(wanted, bucket.num_blocks):
            return False
        blocks = [self._contexts.sequences[handle].blocks if handle in wanted else [] for handle in self._handles]
        if [*map(len, blocks)] != self._sent:
            send_tables(GraphInputs.views(bucket, inputs).tables, blocks)
            self._sent = [*map(len, blocks)]
        return True


def send_tables(tables: Tensor, blocks: Sequence[Sequence[int]]) -> None:
    """Fill block tables [B, N] of a graph, without waiting for the device, between two of its replays."""
    num_rows, width = tables.shape
    rows = [[*its, *[NOTHING] * (width - len(its))] for its in blocks]
    rows += [[NOTHING] * width] * (num_rows - len(rows))
    fill(tables.view(-1), [block for row in rows for block in row])
