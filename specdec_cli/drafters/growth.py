"""A drafted tree while it grows: one depth at a time, by the draft's distribution at every end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import log
from typing import TYPE_CHECKING

from specdec_cli.drafted import CONTEXT_END, NOTHING, Drafted
from specdec_cli.drafters.contract import DraftRow, Guesses

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.lm.cache.unread import Unread
    from specdec_cli.lm.door import Row
    from specdec_cli.sampling.chain import ChainRow, Distribution
    from specdec_cli.sampling.draft import ChildrenWanted


@dataclass(slots=True)
class Growth:
    """The guess for one row as it grows. A chain is the tree with one child per node.

    Args:
        row: who wants it.
        place: the row's place in the call, for errors.
        tokens: of the nodes so far, each depth's after those of the depth before.
        parents: of the nodes so far.
        depth: how deep the tree is.
        unread: the chain's tokens, where the device alone knows them yet.
        is_done: whether it grows no more.
    """

    row: DraftRow
    place: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depth: int = 0
    unread: Unread | None = None
    is_done: bool = False
    # The nodes that get children next, and all that ever got some; the draft model reads no others.
    _ends: Sequence[int] = (CONTEXT_END,)
    _inner: list[int] = field(default_factory=list)
    # Of each node of a static tree: which node of the shape it is.
    _shape_nodes: list[int] = field(default_factory=list)
    # Of each node: the logarithm of its path's draft probability, where that decides which nodes stay.
    _scores: list[float] = field(default_factory=list)
    # q of every end that got children, and for each node which of them it was sampled from.
    _q: list[Tensor] = field(default_factory=list)
    _q_of: list[int] = field(default_factory=list)

    @property
    def num_ends(self) -> int:
        """Nodes that get children next."""
        return len(self._ends)

    @property
    def ends(self) -> Sequence[int]:
        """The nodes that get children next; -1 is the context's end."""
        return self._ends

    @property
    def drafted(self) -> Drafted:
        """The nodes so far."""
        row = self.row
        return Drafted.chain(self.tokens) if row.tree is None else Drafted(tuple(self.tokens), self.parents)

    @property
    def is_plain(self) -> bool:
        """Whether the draft's own scores alone say how a chain goes on: with the likeliest token, or by a draw."""
        from specdec_cli.sampling.chain import ChainRow, is_edited

        row = self.row
        needs_wide_noise = row.params.temperature > 0 and row.shares_noise
        if row.p_min > 0 or needs_wide_noise or row.tree is not None:
            return False
        return not is_edited(ChainRow(row.params, row.context, row.num_prompt_tokens, NOTHING, row.stop_ids))

    @property
    def needs_q(self) -> bool:
        """Whether its nodes come with the q that they were drawn from."""
        return self.row.needs_q and self.is_drawn

    @property
    def is_dynamic(self) -> bool:
        """Whether draft probabilities decide which nodes stay."""
        return self.row.tree is not None and self.row.tree.is_dynamic

    @property
    def is_drawn(self) -> bool:
        """Whether its nodes are chosen by chance.

        In a tree chance pays only where the rule knows q or shares the noise: without that, more likely nodes stand
        more often.
        """
        row = self.row
        has_use = row.tree is None or row.needs_q or row.shares_noise
        return row.params.temperature > 0 and has_use and not self.is_dynamic

    def most_depth(self, max_context: int) -> int:
        """How deep it may grow with a draft model that reads so many tokens."""
        row = self.row
        most = min(row.k, max_context + 1 - len(row.context))
        return most if row.tree is None else min(most, row.tree.depth)

    def wants_more(self, max_context: int) -> bool:
        """Whether another depth is wanted and the draft model can read all that stands before it."""
        return not self.is_done and self.depth < self.most_depth(max_context)

    def take_chain(self, tokens: list[int], unread: Unread | None, q: Tensor | None) -> None:
        """Take a chain that was guessed in one call, with its q [len(tokens), V] where nodes need it."""
        self.tokens, self.parents, self.unread = tokens, list(range(-1, len(tokens) - 1)), unread
        self.depth, self._ends = len(tokens), (len(tokens) - 1,)
        if q is not None:
            self._q, self._q_of = [q], list(range(len(tokens)))

    def to_score(self) -> Row:
        """The row that the draft model scores for its distribution at every end.

        A chain is read as text, so that the draft's cache keeps it.
        """
        from specdec_cli.lm.door import Row

        if self.row.tree is None:
            return Row(self.row.handle, [*self.row.context, *self.tokens], 1)
        return Row(self.row.handle, self.row.context, len(self._ends), self.drafted.keep(self._inner))

    def to_distribute(self) -> list[ChainRow]:
        """Every end with its path, for the chain from logits to q."""
        from specdec_cli.sampling.chain import ChainRow

        row, drafted = self.row, self.drafted
        paths = [[*row.context, *drafted.tokens_to(end)] for end in self._ends]
        return [ChainRow(row.params, path, row.num_prompt_tokens, NOTHING, row.stop_ids) for path in paths]

    def wanted(self, confidences: Sequence[float]) -> list[ChildrenWanted]:
        """The children wanted at every end: none where the draft's largest q is below the row's p_min.

        That is decided before the draw, as deciding on a drawn token's q would bias the output.
        """
        from specdec_cli.sampling.draft import ChildrenWanted

        row, tree = self.row, self.row.tree
        nums = [self._most_children(end) for end in self._ends]
        first = self.depth if tree is None or tree.is_dynamic else tree.num_nodes(self.depth)
        return [
            ChildrenWanted(
                row.params,
                num if not row.p_min or confidence >= row.p_min else 0,
                len(row.context),
                self.depth,
                offset,
                self.is_drawn,
                row.shares_noise,
            )
            for confidence, num, offset in zip(confidences, nums, accumulate(nums, initial=first), strict=False)
        ]

    def grow(self, children: Sequence[Sequence[int]], q: Distribution, first: int) -> None:
        """Take the children of every end; `first` is the first end's position in q, whose row they were drawn from."""
        begin = len(self.tokens)
        for i, (end, tokens) in enumerate(zip(self._ends, children, strict=True)):
            if tokens and self.needs_q:
                self._q_of += [len(self._q)] * len(tokens)
                self._q.append(q.dense()[first + i : first + i + 1])
            self.tokens += tokens
            self.parents += [end] * len(tokens)
            if self.row.tree is not None:
                self._shape_nodes += self.row.tree.children(self._shape_node(end))[: len(tokens)]
        self._go_on(begin)

    def grow_likely(self, children: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Take the likeliest children of every end and their probabilities, as far as the budget goes.

        The nodes that stay are those with the highest cumulative probability of all so far. A node is never likelier
        than its parent, so that the tree is the best one of its size whatever the order it grew in.
        """
        budget, begin = self.row.most_nodes, len(self.tokens)
        least = sorted(self._scores)[-budget] if begin >= budget else -float("inf")
        for end, likely in zip(self._ends, children, strict=True):
            before = 0.0 if end == CONTEXT_END else self._scores[end]
            for token, probability in likely:
                score = before + log(min(probability, 1.0))
                if score < least:
                    break
                self.tokens.append(token)
                self.parents.append(end)
                self._scores.append(score)
        best = sorted(range(len(self.tokens)), key=lambda node: (-self._scores[node], node))[:budget]
        self._keep(sorted(best))
        self._go_on(sum(node < begin for node in best))

    def guesses(self) -> Guesses:
        """The guess, its q stacked to [nodes, V]."""
        import torch

        if not self._q:
            return Guesses(self.drafted, None, self.unread)
        q = torch.cat(self._q)
        if self._q_of != list(range(len(q))):  # siblings were drawn from one q
            q = q[torch.tensor(self._q_of, device=q.device)]
        return Guesses(self.drafted, q, self.unread)

    def _keep(self, nodes: Sequence[int]) -> None:
        """Keep some nodes alone, each together with its parent, and give them new numbers."""
        number = {CONTEXT_END: CONTEXT_END} | {node: i for i, node in enumerate(nodes)}
        self.parents = [number[self.parents[node]] for node in nodes]
        self.tokens = [self.tokens[node] for node in nodes]
        self._scores = [self._scores[node] for node in nodes]

    def _go_on(self, begin: int) -> None:
        """The nodes from `begin` on that may have children are the new ends."""
        self._ends = [node for node in range(begin, len(self.tokens)) if self._most_children(node)]
        self._inner = list(range(len(self.tokens))) if self.is_dynamic else [*self._inner, *self._ends]
        self.depth += 1
        self.is_done = not self._ends

    def _most_children(self, node: int) -> int:
        """Most children of a node, or of the context's end."""
        tree = self.row.tree
        if tree is None:
            return 1
        return self.row.most_nodes if tree.is_dynamic else len(tree.children(self._shape_node(node)))

    def _shape_node(self, node: int) -> int:
        """The node of a static shape whose place a node takes."""
        return CONTEXT_END if node == CONTEXT_END else self._shape_nodes[node]
