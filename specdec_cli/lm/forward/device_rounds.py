"""Rounds that the device goes on with by itself: the host launches each before it has read the one before it.

A round is a draft's replay and the target's. From one to the next only integers differ, and they follow from what the
target has decided. So a third graph behind the target's decides which drafted nodes stand, keeps their keys, and writes
the inputs of the next round where the other two read them. What was decided goes to the host on its own; the host's
books follow when it reads that.

Letters: B sequences, N drafted nodes of each, D their depth, R tokens that the target is fed of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.lm.cache.contexts import Contexts
from specdec_cli.lm.cache.pending_tokens import PendingTokens
from specdec_cli.lm.forward.device_drafts import BlockTables, DecidedTokens, DraftedTokens, DraftOnDevice
from specdec_cli.lm.forward.device_judge import DeviceJudge, ScoredNodes, TreesOnDevice, last_place
from specdec_cli.lm.forward.forward import on_its_device
from specdec_cli.lm.forward.graph_inputs import NOTHING, GraphInputs, fill, values
from specdec_cli.lm.forward.graphs import GraphPool, Outputs, Replay, ScoredGraph, recorded, slots_of
from specdec_cli.lm.hidden_states import HiddenStates
from specdec_cli.transfer import HostCopy


class TargetOnDevice:
    """A target's graph that has scored n sequences: of each its last token and N nodes behind it.

    Args:
        scored: the graph.
        contexts: of the target.
        handles: of the sequences.
        num_nodes: N.
        taps: which of the target's hidden states the draft reads.
    """

    def __init__(
        self, scored: ScoredGraph, contexts: Contexts, handles: Sequence[int], num_nodes: int, taps: Sequence[int]
    ) -> None:
        self.scored, self.handles, self.num_nodes, self.taps = scored, handles, num_nodes, taps
        self._contexts, self._num_filled = contexts, scored.graph.num_filled
        self._tables = BlockTables(contexts, handles, scored.graph)

    @property
    def is_left_alone(self) -> bool:
        """Whether the graph was given no other inputs since."""
        return self.scored.graph.num_filled == self._num_filled

    def leave_out(self, row: int) -> None:
        """Write nothing where a sequence was that has been released."""
        GraphInputs.views(self.scored.graph.bucket, self.scored.graph.inputs).leave_out(row)

    def reserve(self, lengths: Sequence[int | None]) -> bool:
        """Make room for a round behind texts of so many tokens at most; see `DraftOnDevice.reserve`."""
        return self._tables.reserve([None if length is None else length + self.num_nodes for length in lengths])

    def launch(self, unread: PendingTokens | None) -> None:
        """Score the next round, of these nodes."""
        graph = self.scored.graph
        for row, part in zip(graph.drafted, () if unread is None else (unread.tokens, unread.paths), strict=False):
            if part is not None:
                row[: part.numel()].copy_(part.flatten())
        graph.replay()

    def states(self) -> list[HiddenStates] | None:
        """Hidden states of what the latest round has fed of each sequence, copies; None without taps."""
        if len(self.scored.graph.outputs) == 1:
            return None
        each, num = self.scored.graph.bucket.num_tokens, self.num_nodes + 1
        whole = self.scored.graph.outputs[1].clone()
        return [HiddenStates(whole, row * each, row * each + num) for row in range(len(self.handles))]

    def follow(self, texts: Sequence[list[int] | None], *, is_last: bool) -> None:
        """Note what is cached of each text after a round: all but its last token; None for one that was released."""
        for handle, text in zip(self.handles, texts, strict=True):
            if text is not None:
                self._contexts.follow(handle, text, is_last=is_last)


class DecisionGraph:
    """The graph behind a target's: it decides a round and writes the inputs of the next one.

    Args:
        target: of B sequences.
        draft: of the same; None decodes without a draft.
        drafted: nodes of each sequence, of whose tokens nothing is read; where the device chooses the trees, nodes that
            all follow the context.
        depth: D, of the nodes.
        num_tokens: V, the real vocabulary.
        pool: where the graph's own memory comes from; decisions may share it, but no other graphs.
        judge: decides which nodes stand.

    Attributes:
        replay: runs it.
        outcome: [B, 2 (N + 1) + 3] float64: the target's likeliest token at each place, and its logit (0 and the logit
            where that is no finite number); the place behind the last node that stands, the target's own token, and
            1 where no fault was seen.

    Raises:
        RunError: it cannot be recorded.
    """

    def __init__(
        self,
        target: TargetOnDevice,
        draft: DraftOnDevice | None,
        drafted: Drafted,
        depth: int,
        num_tokens: int,
        pool: GraphPool,
        judge: DeviceJudge,
    ) -> None:
        self._target, self._draft, self._num_tokens, self._taps = target.scored, draft, num_tokens, list(target.taps)
        self._is_chain, self.depth, self._num_nodes, self.judge = drafted.is_chain, depth, len(drafted), judge
        inputs, bucket = target.scored.graph.inputs, target.scored.graph.bucket
        device = inputs.device
        self._trees = TreesOnDevice.alike(drafted, bucket.num_rows, device)
        depths = [drafted.depth(node) for node in range(CONTEXT_END, len(drafted))]
        missing = [NOTHING] * (bucket.num_tokens - len(depths))
        self._depths = torch.tensor([*depths, *missing], dtype=torch.int64, device=device)
        # To try it out writes inputs and moves keys: those of no sequence, and then what was there is put back.
        kept = [(each, each.clone()) for each in (inputs, *(() if draft is None else (draft.inputs,)))]
        fill(inputs, values(bucket, (), (), ()))
        self.replay: Replay
        try:
            self.replay, (self.outcome,) = recorded(self._decide, device, pool, "the decision of a round")
        finally:
            for each, before in kept:
                each.copy_(before)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each text [B] before the round to come; 0 where there is no sequence."""
        return GraphInputs.views(self._target.graph.bucket, self._target.graph.inputs).places[:, 0] + 1

    def _decide(self) -> Outputs:
        graph, num_nodes = self._target.graph, self._num_nodes
        step, num_rows = GraphInputs.views(graph.bucket, graph.inputs), graph.bucket.num_rows
        logits, *states = graph.outputs
        scored = self._scored(
            logits[: num_rows * (num_nodes + 1), : self._num_tokens].view(num_rows, num_nodes + 1, -1)
        )
        stands, own, is_right = self.judge.decide(scored)
        own = own.clamp(0, self._num_tokens - 1)[:, None]  # of no sequence it may be anything
        lengths, num = self.lengths, stands.sum(1)
        every = torch.arange(num_nodes, device=num.device)
        path = torch.where(stands, every, num_nodes).sort(1).values[:, : self.depth]
        tokens = torch.cat((step.tokens[:, :1], functional.pad(scored.tokens, (0, 1)).gather(1, path), own), 1)
        tokens = tokens.scatter(1, (num + 1)[:, None], own)
        if not self._is_chain:
            self._keep_path(step, lengths, path, num)
        if self._draft is not None:
            fed = functional.pad(path + 1, (1, 0)).clamp(max=num_nodes)
            chosen = [self._chosen(each, fed) for each in states]
            self._draft.take(DecidedTokens(lengths, num, tokens, chosen[0] if chosen else None))
        self._go_on(step, lengths, lengths + num + 1, own)
        self.judge.go_on(lengths + num + 1)
        found = scored.likeliest, scored.largest[:, :, 0], last_place(stands), own, is_right[:, None]
        return (torch.cat([part.double() for part in found], 1),)

    def _scored(self, scores: Tensor) -> ScoredNodes:
        """The nodes, and what the target says of them by its logits [B, N + 1, V]."""
        best = scores.argmax(-1, keepdim=True)
        largest = scores.gather(2, best)
        likeliest = torch.where(largest.isfinite(), best, 0)[:, :, 0]
        trees, tokens, order, q = self._trees, likeliest[:, :0], None, None
        if self._draft is not None:
            tokens, *masks = self._draft.nodes
            trees = TreesOnDevice.chosen(masks[0]) if masks else trees
            order, q = self._draft.order, self._draft.q if self.judge.needs_q else None
        return ScoredNodes(trees, tokens.clamp(min=0), order, q, scores, likeliest, largest)

    def _chosen(self, states: Tensor, fed: Tensor) -> Tensor:
        """States [B, D + 1, taps, hidden] of some fed tokens [B, D + 1], of all tokens' [B·R, every tap, hidden]."""
        each = states.view(len(fed), -1, *states.shape[1:])
        if self._taps != list(range(states.shape[1])):
            each = torch.stack([each[:, :, tap] for tap in self._taps], 2)
        return each.gather(1, fed[:, :, None, None].expand(-1, -1, *each.shape[2:]))

    def _keep_path(self, step: GraphInputs, lengths: Tensor, path: Tensor, num: Tensor) -> None:
        """Move the keys of a tree's nodes that stand to where text has them."""
        slots = slots_of(step.tables, self._target.block_size, self._target.nowhere)
        depth = torch.arange(path.shape[1], device=path.device)
        is_kept = (depth < num[:, None]) & (lengths > 0)[:, None]
        before, after = (
            torch.where(is_kept, slots.gather(1, place.clamp(max=slots.shape[1] - 1)), self._target.nowhere)
            for place in (lengths[:, None] + path, lengths[:, None] + depth.expand_as(path))
        )
        self._target.cache.move(before.flatten(), after.flatten())

    def _go_on(self, step: GraphInputs, before: Tensor, lengths: Tensor, own: Tensor) -> None:
        """Write the target's next inputs: stand-ins, ancestors, tables and places of logits stay as they are."""
        is_there = (before > 0)[:, None]
        every = torch.arange(len(self._depths), device=lengths.device)
        is_fed = is_there & (self._depths >= 0)
        begin = (lengths - 1)[:, None]
        step.tokens[:, :1].copy_(torch.where(is_there, own, 0))
        step.places.copy_(torch.where(is_fed, begin + every, NOTHING))
        step.positions.copy_(torch.where(is_fed, begin + self._depths, NOTHING))
        num_text = lengths + self._num_nodes if self._is_chain else lengths
        step.num_text.copy_(torch.where(before > 0, num_text, 1))


RoundEnd = tuple[int, int, bool]
"""The last node that stands, the target's own token, and whether no fault was seen."""


@dataclass(frozen=True, slots=True)
class DecidedRound:
    """A round that the host has read.

    Args:
        drafted: its nodes; None without a draft.
        likeliest: the target's likeliest token at each place of each sequence.
        largest: the logits of these.
        ends: of each sequence.
        marks: moments before it, behind its draft and behind the target's forward.
        states: hidden states of what the target was fed of each sequence; None without taps, or of the first round.
    """

    drafted: DraftedTokens | None
    likeliest: list[list[int]]
    largest: list[list[float]]
    ends: list[RoundEnd]
    marks: Sequence[Any]
    states: list[HiddenStates] | None


class RoundsOnDevice:
    """Rounds of n sequences, the first of which has been launched as any other step.

    Args:
        target: scored it.
        draft: drafted it; None without a draft.
        decision: of these two.
        mark: marks a moment of the device's work.
    """

    def __init__(
        self,
        target: TargetOnDevice,
        draft: DraftOnDevice | None,
        decision: DecisionGraph,
        mark: Callable[[], Any],
    ) -> None:
        self.target, self.draft = target, draft
        self.device = decision.outcome.device
        self._decision, self._mark, self._is_new = decision, mark, True
        self._left_out = set[int]()
        self._unread: deque[tuple[DraftedTokens | None, HostCopy, Sequence[Any], list[HiddenStates] | None]] = deque()

    @on_its_device
    @torch.inference_mode()
    def launch(self, begins: Sequence[int | None]) -> bool:
        """Launch a round behind the last one, whose outcome is on its way to the host then.

        Args:
            begins: the shortest that each text may be by then; None for one that was released.

        Returns:
            Whether there was room for it, the graphs were used for nothing else since, and smaller ones do not suffice.
        """
        released = {row for row, begin in enumerate(begins) if begin is None}
        if 2 * (len(begins) - len(released)) <= self.target.scored.graph.bucket.num_rows:
            return False
        lengths = [None if begin is None else begin + self._decision.depth for begin in begins]
        parts = (self.target,) if self.draft is None else (self.target, self.draft)
        if not all(part.is_left_alone for part in parts) or not all(part.reserve(lengths) for part in parts):
            return False
        for row in released - self._left_out:
            for part in parts:
                part.leave_out(row)
        self._left_out = released
        shortest = [begin or 1 for begin in begins]
        if self._is_new:
            self._is_new = False
            self._prepare([length - 1 for length in shortest])
            self._decide(None if self.draft is None else self.draft.first, (), None)
        self._prepare(shortest)
        begin = self._mark()
        drafted = None if self.draft is None else self.draft.launch()
        middle = self._mark()
        self.target.launch(None if drafted is None else drafted.unread)
        # Other work of the target may overwrite its graph's outputs before the host has read this round.
        self._decide(drafted, (begin, middle, self._mark()), self.target.states())
        return True

    def _prepare(self, begins: Sequence[int]) -> None:
        """Send the chance of a round behind texts of these lengths at least."""
        judge = self._decision.judge
        judge.prepare(begins, self._decision.lengths)
        if self.draft is not None:
            self.draft.draw(judge.draft_uniforms, judge.noise)

    @on_its_device
    @torch.inference_mode()
    def _decide(self, drafted: DraftedTokens | None, marks: Sequence[Any], states: list[HiddenStates] | None) -> None:
        self._decision.replay()
        outcome = self._decision.outcome[: len(self.target.handles)]
        self._unread.append((drafted, HostCopy([outcome]), marks, states))

    @on_its_device
    @torch.inference_mode()
    def read(self) -> DecidedRound:
        """The first round that the host has not read; it waits for that round."""
        drafted, outcome, marks, states = self._unread.popleft()
        num, likeliest, largest, ends = self.target.num_nodes + 1, [], [], []
        for row in outcome.read()[0].tolist():
            place, own, is_right = row[2 * num :]
            likeliest.append([int(token) for token in row[:num]])
            largest.append(row[num : 2 * num])
            ends.append((int(place) - 1, int(own), bool(is_right)))
        return DecidedRound(drafted, likeliest, largest, ends, marks, states)
