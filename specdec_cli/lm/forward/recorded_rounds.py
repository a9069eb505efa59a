"""The rounds of a recorded draft: which nodes a module runs in each, where these stand, and which children they get.

A static tree says so beforehand; a chain is the one with a child per node. The nodes of a dynamic tree, with their
slots and masks, are chosen on the device: each round runs as many as there may be, and some of these are nothing.

Letters: B sequences, R nodes that are run in a round, F ends that get children, S slots behind the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.likely_tree import LikelyTrees
from specdec_cli.lm.cache.layout import DraftedNodes
from specdec_cli.lm.forward.graph_draws import Choices
from specdec_cli.lm.forward.graph_inputs import NOTHING
from specdec_cli.tree_shape import TreeShape

NO_PLACE = -(1 << 30)
"""Of what only fills a shape, however many tokens follow it."""


@dataclass(frozen=True, slots=True)
class NodesToRun:
    """The nodes that a module runs in a round.

    Args:
        tokens: of each [B, R] int64.
        slots: of each behind the text [B, R] int64; S for one that is nothing.
        parents: slots of their parents, -1 for the context's end [B, R] int64.
        sees: the slots that each looks at, its own among them [B, R, S] bool; None for a chain, which is text like any
            other.
        depths: of the node in each slot, counted from 0 [B, S] int64.
    """

    tokens: Tensor
    slots: Tensor
    parents: Tensor
    sees: Tensor | None
    depths: Tensor


class RecordedDraft(ABC):
    """The drafts of B sequences while they grow on the device, round by round."""

    @abstractmethod
    def to_run(self, depth: int, is_all: bool) -> NodesToRun:
        """The nodes to run in the round that drafts a depth, from 1 on: those that came last, or all so far."""

    @abstractmethod
    def ends(self, depth: int) -> Tensor:
        """The slots of the nodes that get children in a round [B, F]; -1 is the context's end, S is nothing."""

    @abstractmethod
    def take(self, depth: int, logits: Tensor) -> None:
        """Choose the children of a round by the logits of its ends [B·F, V], or by those of all of them [B, V]."""

    @property
    @abstractmethod
    def nodes(self) -> Tensor:
        """Tokens of the nodes [1, B, nodes] int64, or [2, B, nodes] with their paths, as `PendingTokens` has both."""

    @property
    def q(self) -> tuple[Tensor, ...]:
        """Distributions that nodes were drawn from, and which of them each was, as `drawn_q` takes them.

        Of trees the numbers of the nodes in their shape follow [B, nodes], missing ones last.
        """
        return ()


class RecordedShape(ABC):
    """Rounds and slots that all drafts of one shape and depth share.

    Args:
        depth: rounds.
        num_slots: S.
    """

    def __init__(self, depth: int, num_slots: int) -> None:
        self.depth, self.num_slots = depth, num_slots

    @abstractmethod
    def begin(self, choices: Choices, num_rows: int) -> RecordedDraft:
        """Drafts of B sequences, with nothing drafted yet."""


def shape_to_record(
    shape: TreeShape, depth: int, num_modules: int, is_one_pass: bool, device: torch.device
) -> RecordedShape:
    """How a head drafts a shape.

    Args:
        shape: a tree; a static one is as deep as `depth`.
        depth: of it.
        num_modules: of the head.
        is_one_pass: whether the head drafts all depths in one pass.
        device: of the head.
    """
    if shape.budget is None:
        return _Static(shape, num_modules, is_one_pass, device)
    return _Likeliest(shape.budget, depth)


def num_slots_of(shape: TreeShape, depth: int) -> int:
    """Slots behind the text that a head needs for a shape, unless it drafts in one pass."""
    if shape.budget is None:
        return len(inner_nodes(shape))
    return shape.budget if depth > 1 else 0


def inner_nodes(shape: TreeShape) -> list[int]:
    """The nodes of a static shape that have children: a head runs them, and no others."""
    return sorted(set(shape.parents) - {CONTEXT_END})


def chain_of(num_tokens: int) -> TreeShape:
    """The shape of a chain."""
    return TreeShape(((1,),) * num_tokens)


def nodes_of(begin: Tensor, sees: Tensor, depths: Tensor, places: Tensor, slots: Tensor) -> DraftedNodes:
    """Positions of some drafted nodes, and the places that they see.

    Args:
        begin: place of the first slot behind each text [B]; negative where there is no sequence.
        sees: as `NodesToRun` has it [B, R, S].
        depths: the same [B, S].
        places: of the nodes [B, R]; negative for one that is nothing.
        slots: of every place of each sequence [B, T].
    """
    num_slots, every = depths.shape[1], torch.arange(slots.shape[1], device=slots.device)
    # Before the nodes is text, behind them nothing.
    node = (every - begin[:, None]).clamp(-1, num_slots)
    padded = functional.pad(functional.pad(sees, (1, 0), value=True), (0, 1), value=False)
    is_seen = padded.gather(2, (node + 1)[:, None].expand(-1, sees.shape[1], -1))
    is_seen = is_seen | ((places < 0)[:, :, None] & (every == 0))  # what only fills the shape sees something
    depth = functional.pad(depths, (0, 1)).gather(1, node.clamp(min=0))
    positions = torch.where((node >= 0) & (node < num_slots), begin[:, None] + depth, every).clamp(min=0)
    return DraftedNodes(places, positions, is_seen)


@dataclass(frozen=True, slots=True)
class _Depth:
    """One round of a static shape. A node's slot is its number among those that are run.

    Args:
        nodes: that are run, by their numbers in the shape [R] int64; none at the context's end, or in one pass.
        slots: of each [R] int64.
        parents: slots of their parents [R] int64.
        sees: as `NodesToRun` has it [R, S].
        ends: slots of those that get children [F] int64.
        end_nodes: their numbers in the shape [F] int64; -1 is the context's end.
        nums: children of each [F] int64.
        most: the largest of these.
        children: those that are taken of `most` children of each end [C] int64.
    """

    nodes: Tensor
    slots: Tensor
    parents: Tensor
    sees: Tensor | None
    ends: Tensor
    end_nodes: Tensor
    nums: Tensor
    most: int
    children: Tensor


class _Static(RecordedShape):
    """A static shape, with its indices on the device."""

    def __init__(self, shape: TreeShape, num_modules: int, is_one_pass: bool, device: torch.device) -> None:
        drafted = Drafted(tuple(range(len(shape.parents))), shape.parents)  # any tokens
        run = inner_nodes(shape)
        super().__init__(shape.depth, len(run))
        slot = {CONTEXT_END: CONTEXT_END} | {node: i for i, node in enumerate(run)}
        at = partial(torch.tensor, device=device, dtype=torch.int64)
        self.is_chain, self.depths = shape.is_chain, at([drafted.depth(node) - 1 for node in run])
        # Of each node its path, and which of the distributions it is drawn from: in one pass a depth's nodes share one.
        self.paths = at([[node in drafted.path(end) for node in range(len(drafted))] for end in range(len(drafted))])
        self.q_of = at(
            [
                drafted.depth(node) - 1 if is_one_pass else ([CONTEXT_END, *run]).index(drafted.parents[node])
                for node in range(len(drafted))
            ]
        )
        self.rounds: list[_Depth] = []
        for depth in range(shape.depth):
            ends = [node for node in run if drafted.depth(node) == depth] if depth else [CONTEXT_END]
            nodes = [node for node in run if drafted.depth(node) <= depth] if depth < num_modules else ends
            nodes = [node for node in nodes if node != CONTEXT_END]
            nums = [len(shape.children(end)) for end in ends]
            taken = [i * max(nums) + rank for i, num in enumerate(nums) for rank in range(num)]
            sees = torch.zeros(len(nodes), len(run), dtype=torch.bool)
            for row, node in zip(sees, nodes, strict=True):
                row[[slot[above] for above in drafted.path(node)]] = True
            self.rounds.append(
                _Depth(
                    at(nodes),
                    at([slot[node] for node in nodes]),
                    at([slot[drafted.parents[node]] for node in nodes]),
                    None if shape.is_chain else sees.to(device),
                    at([slot[end] for end in ends]),
                    at(ends),
                    at(nums),
                    max(nums),
                    at(taken),
                )
            )

    def begin(self, choices: Choices, num_rows: int) -> RecordedDraft:
        return _StaticDraft(self, choices, num_rows)


@dataclass(slots=True)
class _StaticDraft(RecordedDraft):
    """Drafts of a static shape: of each sequence the same nodes."""

    shape: _Static
    choices: Choices
    num_rows: int

    def to_run(self, depth: int, is_all: bool) -> NodesToRun:
        each = self.shape.rounds[depth]
        tokens = self.choices.tokens.index_select(1, each.nodes)
        slots, parents, depths = map(self._of_each, (each.slots, each.parents, self.shape.depths))
        sees = None if each.sees is None else self._of_each(each.sees)
        return NodesToRun(tokens, slots, parents, sees, depths)

    def ends(self, depth: int) -> Tensor:
        return self._of_each(self.shape.rounds[depth].ends)

    def take(self, depth: int, logits: Tensor) -> None:
        each = self.shape.rounds[depth]
        by_end = logits.view(self.num_rows, -1, logits.shape[1])
        self.choices.take(by_end, each.end_nodes, each.nums, each.most, each.children)

    @property
    def nodes(self) -> Tensor:
        if not self._may_lack_nodes:
            return self.choices.tokens[None]
        is_there = self.choices.is_there.long()
        bits = torch.ones_like(is_there) << (is_there.cumsum(1) - 1).clamp(min=0)
        paths = (self.shape.paths * bits[:, None]).sum(2) * is_there
        return torch.stack((self.choices.tokens, paths)).gather(2, self._order.expand(2, -1, -1))

    @property
    def q(self) -> tuple[Tensor, ...]:
        if not self.choices.q:
            return ()
        order = self._order
        which = self.shape.q_of.expand(self.num_rows, -1).gather(1, order)
        return (*self.choices.q, which) if self.shape.is_chain else (*self.choices.q, which, order)

    @property
    def _may_lack_nodes(self) -> bool:
        return self.choices.inputs.kind.is_drawn and not self.shape.is_chain

    @property
    def _order(self) -> Tensor:
        """The numbers of the nodes [B, nodes] in the shape, missing ones last."""
        return self.choices.is_there.logical_not().to(torch.uint8).sort(dim=1, stable=True).indices

    def _of_each(self, values: Tensor) -> Tensor:
        return values.expand(self.num_rows, *values.shape)


class _Likeliest(RecordedShape):
    """A dynamic tree: of all nodes the likeliest ones."""

    def __init__(self, num_nodes: int, depth: int) -> None:
        super().__init__(depth, num_nodes)

    def begin(self, choices: Choices, num_rows: int) -> RecordedDraft:
        return _LikeliestDraft(self.num_slots, choices, num_rows)


class _LikeliestDraft(RecordedDraft):
    """Dynamic trees of N nodes at most. Each has a slot, which a node that has left the tree leaves to a new one.

    Args:
        num_nodes: N; as many slots.
        choices: chooses the children.
        num_rows: B.
    """

    def __init__(self, num_nodes: int, choices: Choices, num_rows: int) -> None:
        self._num, self._choices = num_nodes, choices
        device = choices.inputs.numbers.device
        self._every = torch.arange(num_nodes, device=device)
        self._bits = torch.ones_like(self._every) << self._every
        self._trees = LikelyTrees.empty(num_rows, num_nodes, device)
        # Of each node its slot, and those of its path as bits.
        self._slots = torch.full_like(self._trees.tokens, num_nodes)
        self._paths = torch.zeros_like(self._slots)
        self._is_broken = torch.zeros(num_rows, 1, dtype=torch.bool, device=device)

    def to_run(self, depth: int, is_all: bool) -> NodesToRun:
        numbers = self._every.expand_as(self._slots) if is_all else self._new(depth)
        of = partial(_of_nodes, numbers=numbers)
        slots, parents = of(self._slots, nothing=self._num), of(self._trees.parents, nothing=CONTEXT_END)
        depths = torch.zeros_like(functional.pad(self._slots, (0, 1)))
        depths = depths.scatter(1, self._slots, self._sees(self._paths).sum(2) - 1)[:, :-1]
        above = functional.pad(self._slots, (1, 0), value=CONTEXT_END).gather(1, parents + 1)
        return NodesToRun(of(self._trees.tokens), slots, above, self._sees(of(self._paths)), depths)

    def ends(self, depth: int) -> Tensor:
        if not depth:
            return torch.full_like(self._slots[:, :1], CONTEXT_END)
        return _of_nodes(self._slots, self._new(depth), self._num)

    def take(self, depth: int, logits: Tensor) -> None:
        ends = self._new(depth) if depth else torch.full_like(self._slots[:, :1], CONTEXT_END)
        tokens, probabilities, is_number = (
            its.view(len(ends), -1, its.shape[1]).expand(-1, ends.shape[1], -1)
            for its in self._choices.likely_children(logits, self._num)
        )
        self._is_broken = self._is_broken | ((ends < self._num) & ~is_number[:, :, 0]).any(1, keepdim=True)
        self._trees, before = self._trees.grown(ends, tokens, probabilities)
        self._place(before)

    @property
    def nodes(self) -> Tensor:
        tokens = torch.where(self._is_broken, NOTHING, self._trees.tokens)
        if self._num == 1:
            return tokens[None]  # the host knows where a single node stands
        slots = self._slots.clamp(max=self._num - 1)
        is_above = self._sees(self._paths).gather(2, slots[:, None].expand(-1, self._num, -1))
        is_above = is_above & self._trees.is_there[:, None]
        return torch.stack((tokens, (is_above * self._bits).sum(2)))

    def _new(self, depth: int) -> Tensor:
        """Numbers of the newest nodes [B, F], N where there are fewer; those of a depth are fewer the deeper it is."""
        return self._trees.new(self._num - depth + 1)

    def _sees(self, paths: Tensor) -> Tensor:
        """Bits as a mask of slots [B, R, S]."""
        return (paths[:, :, None] >> self._every & 1).bool()

    def _place(self, before: Tensor) -> None:
        """Give new nodes the first free slots; `before` is what number each had [B, N]."""
        slots, paths = _of_nodes(self._slots, before, self._num), _of_nodes(self._paths, before)
        is_taken = torch.zeros_like(functional.pad(slots, (0, 1))).scatter(1, slots, 1)[:, :-1]
        free = is_taken.sort(dim=1, stable=True).indices
        is_new = (before >= self._num) & self._trees.is_there
        own = free.gather(1, (self._every - self._trees.num_old).clamp(min=0))
        self._slots = torch.where(is_new, own, slots)
        above = functional.pad(paths, (1, 0)).gather(1, self._trees.parents + 1)
        self._paths = torch.where(is_new, above | self._bits[own], paths)


def _of_nodes(values: Tensor, numbers: Tensor, nothing: int = 0) -> Tensor:
    """Values of some nodes [B, n], of values of all [B, N]; `nothing` for numbers of N and more."""
    return functional.pad(values, (0, 1), value=nothing).gather(1, numbers.clamp(max=values.shape[1]))
