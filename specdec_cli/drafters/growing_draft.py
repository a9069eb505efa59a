"""Drafted trees while they grow: a depth each round, or all depths at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from specdec_cli.drafted import CONTEXT_END, NOTHING, Drafted
from specdec_cli.drafters.contract import DraftRow, Guesses

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.likely_tree import LikelyTrees
    from specdec_cli.lm.door import Row
    from specdec_cli.sampling.chain import ChainRow, Distribution
    from specdec_cli.sampling.draft import ChildrenWanted


@dataclass(slots=True)
class GrowingDraft:
    """The guess for one row as it grows. A chain is the tree with one child per node.

    Args:
        row: the row that it is for.
        place: the row's place in the call, for errors.
        tokens: tokens of the nodes so far, depth by depth.
        parents: of the nodes so far.
        depth: depth of the tree.
        is_done: whether it grows no more.
    """

    row: DraftRow
    place: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depth: int = 0
    is_done: bool = False
    # The nodes that get children next, and all that ever got some; the draft model reads no others.
    _ends: Sequence[int] = (CONTEXT_END,)
    _inner: list[int] = field(default_factory=list)
    # Of each node of a static tree: which node of the shape it is.
    _shape_nodes: list[int] = field(default_factory=list)
    # The nodes of a dynamic tree with the probabilities of their paths, which decide which ones stay.
    _likely: LikelyTrees | None = None
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
    def needs_q(self) -> bool:
        """Whether its nodes come with the q that they were drawn from."""
        return self.row.needs_q and self.row.is_drawn

    @property
    def is_dynamic(self) -> bool:
        """Whether draft probabilities decide which nodes stay."""
        return self.row.tree is not None and self.row.tree.is_dynamic

    def wants_more(self, max_context: int) -> bool:
        """Whether another depth is wanted and the draft model can read all that stands before it."""
        return not self.is_done and self.depth < self.row.most_depth(max_context)

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
                row.is_drawn,
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

        The nodes that stay are those with the highest cumulative probability of all so far.
        """
        import torch

        from specdec_cli.likely_tree import LikelyTrees

        trees = self._likely or LikelyTrees.empty(1, self.row.most_nodes, torch.device("cpu"))
        most = max(map(len, children))
        padded = torch.tensor([[*its, *[(0, 0.0)] * (most - len(its))] for its in children], dtype=torch.float64)
        tokens, probabilities = padded.view(1, len(children), most, 2).unbind(-1)
        self._likely, _ = trees.grown(torch.tensor([[*self._ends]]), tokens.long(), probabilities)
        num = int(self._likely.is_there.sum())
        self.tokens, self.parents = (its[0, :num].tolist() for its in (self._likely.tokens, self._likely.parents))
        self._go_on(int(self._likely.num_old))

    def guesses(self) -> Guesses:
        """The guess, its q stacked to [nodes, V]."""
        import torch

        from specdec_cli.transfer import sent

        if not self._q:
            return Guesses(self.drafted)
        q = torch.cat(self._q)
        if self._q_of != list(range(len(q))):  # siblings were drawn from one q
            q = q[sent(self._q_of, torch.int64, q.device)]
        return Guesses(self.drafted, q)

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


def grow_deeper(
    drafts: Sequence[GrowingDraft], logits: Tensor, num_tokens: int, name: str, confidence: Tensor | None = None
) -> None:
    """Give every row's guess its next depth, or end it.

    If a later distribution is invalid, the row keeps the tokens drafted so far: the target decides on them anyway. A
    row whose draft knows banned tokens alone at this depth ends there, too.

    Args:
        drafts: rows that want more.
        logits: [ends of all rows, V] float32; left unchanged.
        num_tokens: V, the real vocabulary.
        name: of the draft, for messages.
        confidence: how sure the draft is at every end [n], whatever it draws there; None takes the largest probability.

    Raises:
        LogitsError: a row has no distribution at its first token.
    """
    from specdec_cli.sampling.chain import LogitsError, NoTokenLeftError, distribution

    ends = [(draft, end) for draft in drafts for end in draft.to_distribute()]
    try:
        q = distribution(logits, [end for _, end in ends], num_tokens)
    except LogitsError as error:
        draft = ends[error.row][0]
        if draft.tokens or isinstance(error, NoTokenLeftError):
            draft.is_done = True
            return
        raise LogitsError(f"the draft `{name}`: {error.message}", draft.place, error.hint) from error
    _take_children(drafts, q, confidence)


def _take_children(drafts: Sequence[GrowingDraft], q: Distribution, confidence: Tensor | None) -> None:
    """Choose the children of every end and keep them.

    Noise is keyed and has no state: a draw that is not kept changes no other.
    """
    from specdec_cli.sampling.draft import draft_children, likely_children

    ends = [draft.num_ends for draft in drafts]
    starts = [0, *accumulate(ends)]
    is_unsure = any(draft.row.p_min > 0 for draft in drafts)
    sure = [1.0] * starts[-1]
    if is_unsure:
        sure = (q.confidence() if confidence is None else confidence).tolist()
    wanted = [draft.wanted(sure[start : start + num]) for draft, start, num in zip(drafts, starts, ends, strict=False)]
    dynamic = [draft.is_dynamic for draft in drafts]
    if any(dynamic):
        likely = likely_children(q, [each.num for its in wanted for each in its])
    if not all(dynamic):
        children = draft_children(q, [each for its in wanted for each in its])
    for draft, start, num in zip(drafts, starts, ends, strict=False):
        if draft.is_dynamic:
            draft.grow_likely(likely[start : start + num])
        else:
            draft.grow(children[start : start + num], q, start)


def grow_whole(
    drafts: Sequence[GrowingDraft],
    depths: Mapping[int, int],
    logits: Callable[[Sequence[GrowingDraft]], Tensor],
    num_tokens: int,
    name: str,
    confidence: Callable[[Sequence[GrowingDraft]], Tensor] | None = None,
) -> None:
    """Grow guesses to their full depth, a round for each depth, as logits may depend on the tokens before them.

    The sampling settings are applied along each path, so that q is the distribution that a node was drawn from,
    penalties included.

    Args:
        drafts: the guesses.
        depths: of each guess by its place, how deep it may grow.
        logits: of the next depth of guesses, [ends, V] float32, which stays unchanged.
        num_tokens: V, the real vocabulary.
        name: of the draft, for messages.
        confidence: how sure the draft is of the next depth, [ends]; None goes by the largest probability.

    Raises:
        LogitsError: a row has no distribution at its first token.
    """
    while growing := [draft for draft in drafts if not draft.is_done and draft.depth < depths[draft.place]]:
        sure = None if confidence is None else confidence(growing)
        grow_deeper(growing, logits(growing), num_tokens, name, sure)


def grow_marginals(drafts: Sequence[GrowingDraft], rows: Mapping[int, Tensor], num_tokens: int, name: str) -> None:
    """Grow guesses whose logits at a depth are the same whatever stands before it.

    A chain takes a token from each depth. A tree's nodes of one depth have their children from the same distribution.

    Args:
        drafts: the guesses.
        rows: of each guess by its place, its logits [depth, V] float32, which stay unchanged.
        num_tokens: V, the real vocabulary.
        name: of the draft, for messages.

    Raises:
        LogitsError: a row has no distribution at its first token.
    """
    alike = [draft for draft in drafts if _is_alike(draft)]
    for draft in alike:
        _grow_alike(draft, rows[draft.place], num_tokens, name)
    others = [draft for draft in drafts if draft not in alike]
    grow_whole(
        others, {place: len(its) for place, its in rows.items()}, lambda some: rows_at(some, rows), num_tokens, name
    )


def _is_alike(draft: GrowingDraft) -> bool:
    """Whether all nodes of a depth have the same likeliest children: those of a tree without penalties are searched."""
    return draft.is_dynamic and not draft.row.is_edited


def _grow_alike(draft: GrowingDraft, logits: Tensor, num_tokens: int, name: str) -> None:
    """Grow a tree by its likeliest nodes; each depth's distribution is computed once, however many nodes it has."""
    from specdec_cli.sampling.chain import ChainRow, LogitsError, NoTokenLeftError, distribution
    from specdec_cli.sampling.draft import likely_children

    row = draft.row
    # Without penalties and the like, the tokens before a place change nothing: any will do.
    chain = ChainRow(
        row.params, row.context, row.num_prompt_tokens, Drafted.chain([0] * (len(logits) - 1)), row.stop_ids
    )
    try:
        q = distribution(logits, [chain], num_tokens)
    except NoTokenLeftError:
        return
    except LogitsError as error:
        raise LogitsError(f"the draft `{name}`: {error.message}", draft.place, error.hint) from error
    sure = q.confidence().tolist() if row.p_min > 0 else [1.0] * len(logits)
    likely = likely_children(q, [row.most_nodes] * len(logits))
    for depth, children in enumerate(likely):
        is_unsure = row.p_min > 0 and sure[depth] < row.p_min
        if draft.is_done or depth in q.broken or is_unsure:
            break
        draft.grow_likely([children] * draft.num_ends)


def rows_at(growing: Sequence[GrowingDraft], rows: Mapping[int, Tensor]) -> Tensor:
    """The row of each guess's next depth, for every end.

    Args:
        growing: the guesses.
        rows: of each by its place, [depth, width].

    Returns:
        Rows [ends, width]; a view where there is one guess with one end.
    """
    import torch

    parts = [rows[draft.place][draft.depth].expand(draft.num_ends, -1) for draft in growing]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
