"""Chains and trees of a draft head as CUDA graphs: the target's new states go in, the tokens stay on the device.

One graph feeds the states of all sequences and then drafts depth by depth. Sequences, new positions and blocks are
padded to a `Bucket`, and what differs from step to step is one vector of integers, as in `lm.forward.graphs`. The shape
of a tree, or the size of a dynamic one, is part of what is recorded (`recorded_rounds`). Nothing is kept of drafted
nodes: the next step writes over their slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specdec_cli.errors import RunError
from specdec_cli.lm.cache.layout import DraftedNodes
from specdec_cli.lm.cache.pending_tokens import PendingTokens
from specdec_cli.lm.door import Continuations, Draw
from specdec_cli.lm.forward.graph_draws import ChoiceInputs, ChoiceKind, Choices, drawn_q
from specdec_cli.lm.forward.graph_inputs import MOST_TOKENS, NOTHING, Bucket, fill
from specdec_cli.lm.forward.graphs import GraphPool, Outputs, Replay, kernels_for, recorded, slots_of
from specdec_cli.lm.forward.recorded_rounds import (
    NO_PLACE,
    RecordedDraft,
    RecordedShape,
    chain_of,
    nodes_of,
    shape_to_record,
)
from specdec_cli.lm.heads.head_module import HeadModule
from specdec_cli.lm.heads.recorded_feed import RecordedFeed
from specdec_cli.tree_shape import TreeShape


@dataclass(slots=True)
class HeadDraftRow:
    """One sequence that wants a chain or a tree.

    Args:
        handle: names the sequence.
        context: of the sequence.
        features: the target's states [n, taps, target hidden] of the last n positions that a token follows.
        num_tokens: to draft one after another, at least 1; of a tree, its depth.
        draw: how a chain's are drawn, or a dynamic tree's probabilities follow from logits; None takes the likeliest.
    """

    handle: int
    context: Sequence[int]
    features: Tensor | None
    num_tokens: int
    draw: Draw | None = None


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """A step's inputs for M modules, all int64 and views of one vector.

    Args:
        tokens: of the new slots [B, R]: those behind the new positions, or those at them (`Head.reads_before`).
        places: of the new slots in each module [M, B, R]; negative for none.
        last: column of the last new position of each sequence [B]; `NOTHING` where there is none.
        begin: place of the first drafted node in the first module [B]; each further module's is one less.
        tables: blocks of each sequence in each module [M, B, N].
        anchors: last token of each context [B].
    """

    tokens: Tensor
    places: Tensor
    last: Tensor
    begin: Tensor
    tables: Tensor
    anchors: Tensor

    @classmethod
    def views(cls, bucket: Bucket, num_modules: int, vector: Tensor) -> HeadInputs:
        """The parts of a vector that `_values` filled."""
        rows, each, blocks = bucket.num_rows, bucket.num_tokens, bucket.num_blocks
        fed, every = rows * each, num_modules * rows
        parts = torch.split(vector, [fed, every * each, rows, rows, every * blocks, rows])
        tokens, places = parts[0].view(rows, each), parts[1].view(num_modules, rows, each)
        return cls(tokens, places, parts[2], parts[3], parts[4].view(num_modules, rows, blocks), parts[5])

    def leave_out(self, row: int) -> None:
        """Make a sequence one that only fills the shape, but for its blocks; the device is not waited for."""
        self.places[:, row].fill_(NOTHING)
        self.last[row].fill_(NOTHING)
        self.begin[row].fill_(NO_PLACE)


def _values(
    bucket: Bucket, modules: Sequence[HeadModule], rows: Sequence[HeadDraftRow], counts: Sequence[int]
) -> list[int]:
    """A step's inputs one after another, as `HeadInputs.views` takes them apart.

    Args:
        bucket: holds them.
        modules: of the head.
        rows: the sequences, with blocks for all that is to be written.
        counts: how many new positions each has.
    """
    each, missing = bucket.num_tokens, bucket.num_rows - len(rows)
    tokens: list[int] = []
    for row, num in zip(rows, counts, strict=True):
        end = len(row.context) - modules[0].head.reads_before
        tokens += [*row.context[end - num : end], *[0] * (each - num)]
    values = [*tokens, *[0] * (missing * each)]
    for m, module in enumerate(modules):
        for row, num in zip(rows, counts, strict=True):
            first, kept = len(row.context) - 1 - num - m, module.cache.of(row.handle).num_kept
            values += [place if place >= kept else NOTHING for place in range(first, first + num)]
            values += [NOTHING] * (each - num)
        values += [NOTHING] * (missing * each)
    values += [*(num - 1 if num else NOTHING for num in counts), *[NOTHING] * missing]
    values += [*(len(row.context) - 1 for row in rows), *[NO_PLACE] * missing]
    for module in modules:
        for row in rows:
            blocks = module.cache.of(row.handle).blocks
            values += [*blocks, *[NOTHING] * (bucket.num_blocks - len(blocks))]
        values += [NOTHING] * (missing * bucket.num_blocks)
    return [*values, *(row.context[-1] for row in rows), *[0] * missing]


@dataclass(slots=True)
class HeadGraph:
    """A recorded draft: what it reads, how it runs, what it leaves.

    Args:
        bucket: its shape.
        inputs: as `_values` fills it.
        states: the target's, of new positions [B, R, taps, target hidden].
        before: each module's output before the new positions [M, B, hidden].
        choice: chooses the tokens.
        replay: runs it.
        outputs: as `RecordedDraft.nodes`, each module's output at the last kept slot [M, B, hidden], the q of drawn
            tokens.
        num_filled: how often the host has given it inputs.
    """

    bucket: Bucket
    inputs: Tensor
    states: Tensor
    before: Tensor
    choice: ChoiceInputs
    replay: Replay
    outputs: Outputs
    num_filled: int = 0


class HeadGraphs:
    """The graphs of one head, each recorded when it is first needed.

    Args:
        modules: of the head; once their caches move, `drop` the graphs.
        name: of the draft, for messages.
        state_shape: taps, and the width of the target's states.
        like: a tensor of the target's dtype, on its device.

    Attributes:
        guessed: the graph of the latest guess; None where further guesses have another shape.
    """

    def __init__(self, modules: Sequence[HeadModule], name: str, state_shape: tuple[int, int], like: Tensor) -> None:
        self._modules, self._name, self._state_shape, self._like = modules, name, state_shape, like
        self._device = like.device
        self._kernels = kernels_for(self._device)
        with torch.inference_mode():
            self._width = modules[0].head.mix(like.new_zeros(2, *state_shape)).shape[-1]
        self.guessed: HeadGraph | None = None
        self._graphs: dict[tuple[Bucket, TreeShape, int, int, ChoiceKind], HeadGraph] = {}
        self.drop()

    def try_out(self) -> None:
        """Record the smallest chain that runs every module.

        Raises:
            RunError: the head cannot be recorded.
        """
        bucket, first = Bucket.around(1, 1, 1), self._modules[0].head
        for module in self._modules:
            obstacle = module.head.recording_obstacle
            if module.head.key_shape != module.head.value_shape:
                obstacle = "its values are not as wide as its keys"
            if obstacle is not None:
                raise RunError(f"{self._what} cannot be recorded: {obstacle}", "use --decoder transformers")
        num_tokens = min(len(self._modules) + 1, first.most_tokens or MOST_TOKENS)
        self._recorded(bucket, chain_of(num_tokens), num_tokens, first.vocab_size, ChoiceKind())

    def drop(self) -> None:
        """Forget what was recorded, as the caches move."""
        self._graphs.clear()
        self._pool = GraphPool(self._device)  # the old one went with the last of its graphs

    def guess(
        self, rows: Sequence[HeadDraftRow], num_tokens: int, tree: TreeShape | None = None
    ) -> tuple[Continuations, Tensor]:
        """Chains or trees, whose keys and values are written.

        Args:
            rows: sequences with blocks for their new positions, at most `MOST_TOKENS`, and drafted nodes.
            num_tokens: V, the real vocabulary; no token is beyond it.
            tree: the shape of all of them, which draw nothing and are equally deep; None makes chains.

        Returns:
            Their tokens, and each module's output at the last kept slot [M, rows, hidden], tensors of their own.

        Raises:
            RunError: the head cannot be recorded.
        """
        counts = [0 if row.features is None else len(row.features) for row in rows]
        blocks = [len(module.cache.of(row.handle).blocks) for row in rows for module in self._modules]
        depth, draws = max(row.num_tokens for row in rows), [row.draw for row in rows]
        # However many tokens of such a draft are accepted: one shape for all further steps.
        num_fed = max(*counts, min(depth + 1, MOST_TOKENS))
        bucket = Bucket.around(len(rows), num_fed, max(blocks))
        key = bucket, tree or chain_of(depth), depth, num_tokens, ChoiceKind.of(draws, num_tokens)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._recorded(*key)
        self._fill(graph, bucket, rows, counts)
        graph.choice.fill(draws)
        graph.replay()
        nodes, ends, *q = graph.outputs
        unread = PendingTokens(*nodes[:, : len(rows)].clone())
        is_lasting = num_fed == depth + 1 and min(row.num_tokens for row in rows) == depth
        self.guessed = graph if is_lasting else None
        nums = [row.num_tokens if tree is None else tree.num_nodes(depth) for row in rows]
        tokens = [unread.stand_ins(i, num) for i, num in enumerate(nums)]
        return Continuations(tokens, unread, drawn_q(draws, nums, q)), ends[:, : len(rows)].clone()

    @property
    def _what(self) -> str:
        return f"the draft head `{self._name}`"

    def _fill(self, graph: HeadGraph, bucket: Bucket, rows: Sequence[HeadDraftRow], counts: Sequence[int]) -> None:
        """Give a graph what differs from step to step; states that no slot reads are those of an earlier step."""
        fill(graph.inputs, _values(bucket, self._modules, rows, counts))
        graph.num_filled += 1
        reads_before = len(self._modules) > 1 or self._modules[0].head.reads_before
        for i, (row, num) in enumerate(zip(rows, counts, strict=True)):
            if row.features is not None:
                graph.states[i, :num].copy_(row.features)
            for m, module in enumerate(self._modules):
                before = module.cache.of(row.handle).outputs.get(())
                if before is not None and (reads_before or not num):
                    graph.before[m, i].copy_(before)
                elif reads_before:
                    graph.before[m, i].zero_()  # at a text's beginning

    def _recorded(self, bucket: Bucket, shape: TreeShape, depth: int, num_tokens: int, kind: ChoiceKind) -> HeadGraph:
        inputs = torch.tensor(_values(bucket, self._modules, (), ()), device=self._device)
        states = self._like.new_zeros(bucket.num_rows, bucket.num_tokens, *self._state_shape)
        before = self._like.new_zeros(len(self._modules), bucket.num_rows, self._width)
        choice = ChoiceInputs.sized(kind, num_tokens, bucket.num_rows, shape, depth, self._device)
        is_one_pass = self._modules[0].head.is_one_pass
        plan = shape_to_record(shape, depth, len(self._modules), is_one_pass, self._device)
        run = partial(self._guess, bucket, plan, choice, inputs, states, before)
        replay, outputs = recorded(run, self._device, self._pool, self._what)
        return HeadGraph(bucket, inputs, states, before, choice, replay, outputs)

    def _guess(
        self,
        bucket: Bucket,
        shape: RecordedShape,
        choice: ChoiceInputs,
        inputs: Tensor,
        states: Tensor,
        before: Tensor,
    ) -> Outputs:
        """The nodes, each module's output [M, B, hidden] at the last kept slot, and the q of drawn tokens."""
        step = HeadInputs.views(bucket, len(self._modules), inputs)
        caches = [module.cache for module in self._modules]
        slots = [slots_of(its, cache.block_size, cache.nowhere) for its, cache in zip(step.tables, caches, strict=True)]
        ends = self._feed(step, states, before, slots)
        choices = Choices(choice)
        draft = shape.begin(choices, bucket.num_rows)
        if self._modules[0].head.is_one_pass:
            self._choose_ahead(draft, choices, shape.depth, step, ends[0], slots[0])
        else:
            self._choose_by_rounds(draft, shape, step, ends, slots)
        return draft.nodes, torch.stack(ends), *draft.q

    def _choose_by_rounds(
        self,
        draft: RecordedDraft,
        shape: RecordedShape,
        step: HeadInputs,
        ends: Sequence[Tensor],
        slots: Sequence[Tensor],
    ) -> None:
        """Run what was drafted before each round, and take the tokens of the round.

        Args:
            draft: of the shape.
            shape: says how deep it is.
            step: its inputs.
            ends: output of the last kept slot of each sequence [B, hidden], of each module.
            slots: of every place of each sequence [B, T], of each module.
        """
        heads, source = [module.head for module in self._modules], 0
        outputs = _with_room(ends[0], shape.num_slots)
        for depth in range(shape.depth):
            # A module of its own reads the one before it at every node so far; the last one goes on with its own.
            m = min(depth, len(heads) - 1)
            if depth:
                new = draft.to_run(depth, is_all=depth == m)
                feature = heads[source].recycled(_at_slots(outputs, new.parents).flatten(0, 1))
                begin, is_there = step.begin - m, new.slots < shape.num_slots
                places = torch.where(is_there, begin[:, None] + new.slots, NO_PLACE)
                nodes = None if new.sees is None else nodes_of(begin, new.sees, new.depths, places, slots[m])
                output = self._run(m, new.tokens, feature.view(*places.shape, -1), places, slots[m], nodes)
                outputs = outputs if m == source else _with_room(ends[m], shape.num_slots)
                outputs = outputs.scatter(1, (new.slots + 1)[:, :, None].expand_as(output), output)
                source = m
            draft.take(depth, heads[m].logits(_at_slots(outputs, draft.ends(depth)).flatten(0, 1)))

    def _choose_ahead(
        self, draft: RecordedDraft, choices: Choices, num: int, step: HeadInputs, end: Tensor, slots: Tensor
    ) -> None:
        """Take the tokens of all rounds by the logits of one pass.

        Args:
            draft: of some shape.
            choices: of its tokens.
            num: rounds.
            step: its inputs.
            end: output of the last kept slot of each sequence [B, hidden].
            slots: of every place of each sequence [B, T].
        """

        def feed(num: int) -> RecordedFeed:
            return self._new_slots(0, step.begin[:, None] + torch.arange(num, device=self._device), slots)

        ahead = self._modules[0].head.recorded_ahead(num, step.anchors, end, feed)
        before = step.anchors[:, None]
        for depth in range(num):
            logits = ahead.logits[:, depth] if ahead.behind is None else ahead.behind(depth, before)
            draft.take(depth, logits)
            if ahead.behind is not None:
                before = torch.cat([step.anchors[:, None], choices.tokens.clamp(min=0)], 1)

    def _feed(self, step: HeadInputs, states: Tensor, before: Tensor, slots: Sequence[Tensor]) -> list[Tensor]:
        """Take new positions, module after module; the output [B, hidden] of each at its last kept slot.

        In the place of an output, a head that reads the states before a token keeps those of the position.
        """
        feature = self._modules[0].head.mix(states.flatten(0, 1)).view(*states.shape[:2], -1)
        column, ends = step.last.clamp(min=0)[:, None], []
        for m, module in enumerate(self._modules):
            reads_before = module.head.reads_before
            read = _shifted(before[m], feature) if reads_before else feature
            output = self._run(m, step.tokens, read, step.places[m], slots[m])
            kept = feature if reads_before else output
            end = kept.gather(1, column[:, :, None].expand(-1, -1, kept.shape[2]))[:, 0]
            is_new = (step.last[:, None] >= 0) & (step.places[m].gather(1, column) >= 0)
            ends.append(torch.where(is_new, end, before[m]))
            if module is not self._modules[-1]:
                shifted = _shifted(before[m], output)
                feature = module.head.recycled(shifted.flatten(0, 1)).view(shifted.shape)
        return ends

    def _run(
        self,
        m: int,
        tokens: Tensor,
        feature: Tensor,
        places: Tensor,
        slots: Tensor,
        nodes: DraftedNodes | None = None,
    ) -> Tensor:
        """A module's output [B, R, hidden] of tokens [B, R] with their features [B, R, hidden] at places [B, R]."""
        head, feed = self._modules[m].head, self._new_slots(m, places, slots, nodes)
        embedded = head.embed(tokens.clamp(min=0).flatten())
        return head.run(embedded, feature.flatten(0, 1), feed.positions, [feed]).view(*tokens.shape, -1)

    def _new_slots(self, m: int, places: Tensor, slots: Tensor, nodes: DraftedNodes | None = None) -> RecordedFeed:
        """New slots of a module at places [B, R]; `slots` are of every place [B, T]."""
        cache = self._modules[m].cache
        return RecordedFeed.new(cache.keys, cache.values, slots, places, cache.nowhere, self._kernels, nodes)


def _shifted(before: Tensor, each: Tensor) -> Tensor:
    """The state before each new position [B, R, hidden]: `before` [B, hidden], then those of all but the last."""
    return torch.cat([before[:, None], each[:, :-1]], 1)


def _with_room(end: Tensor, num_slots: int) -> Tensor:
    """Outputs [B, 1 + slots + 1, hidden]: that of the context's end [B, hidden], room for nodes, and for nothing."""
    return torch.cat([end[:, None], end.new_zeros(len(end), num_slots + 1, end.shape[1])], 1)


def _at_slots(outputs: Tensor, slots: Tensor) -> Tensor:
    """Outputs [B, n, hidden] of some slots [B, n]; -1 is the context's end."""
    return outputs.gather(1, (slots + 1)[:, :, None].expand(-1, -1, outputs.shape[2]))
