"""Verification rules that compare p with q: recursive rejection, and traversal, which is block verification on a chain.

Both judge the children of a node one after the other. Once a child is refused, its parent goes on with the residual
(a p - q)+ as its new p, and with a q that lacks the child: siblings were drawn without replacement. A draft without
chance is one-hot at each of its tokens, so a refusal takes the token alone out of p.

- Recursive rejection (Jeon et al. 2024, "Recursive speculative decoding"; Chen et al. 2024, "Sequoia") walks down from
  the context's end: a child stands if u < p(x)/q(x), with the p and q that its refused siblings leave; a is 1.
- Traversal (Weng et al. 2025, "Traversal verification") goes up from the leaves, in post-order. Each node v carries
  a(v): 1 at the context's end, min(1, a(v) p(x)/q(x)) at a child. Once a child is refused, with S = Σ(a p - q)+,
  a(v) becomes S/(S + 1 - a(v)). A node that has no child left to try stands if u < a(v), with its whole path.
  None of these numbers depends on chance, so all are computed beforehand, level by level.

Letters: n parents, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from sys import float_info

import torch
from torch import Tensor

from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.engine.verify import RowGroup, Verdict, together
from specdec_cli.transfer import sent


@dataclass(slots=True, eq=False)
class _Parent:
    """A node whose children are judged one after the other, and what the refused ones leave.

    Args:
        row: its row's place in the group.
        node: its number, or CONTEXT_END.
        children: its children, at least one, in their order.
        mass: a, the part of the target's probability that the rule keeps for this node; always 1 in rejection.
        num_refused: how many of its children were refused.
        total: sum of `weights`.
        rest: what q holds besides the refused children.
        weights: [V] float32, p as the refused children leave it, not normalized; None is p's own row.
    """

    row: int
    node: int
    children: list[int]
    mass: float = 1.0
    num_refused: int = 0
    total: float = 1.0
    rest: float = 1.0
    weights: Tensor | None = None

    @property
    def child(self) -> int:
        """The child that is judged now."""
        return self.children[self.num_refused]

    @property
    def is_last(self) -> bool:
        """Whether no other child comes after the child that is judged now."""
        return self.num_refused == len(self.children) - 1


@dataclass(slots=True)
class _Residuals:
    """The p and q of a group's children, and what refusals leave of them.

    Attributes:
        p: each row's p(x), a refused sibling's successor with the weight that the refusal leaves it.
        q: each row's q(x), 1 where it was drafted without chance.
        children: each row's nodes after the context's end and after every node.
    """

    group: RowGroup
    p: list[list[float]] = field(init=False)
    q: list[list[float]] = field(init=False)
    children: list[list[list[int]]] = field(init=False)

    def __post_init__(self) -> None:
        """Look p(x) and q(x) up."""
        self.p, self.q = self.group.p_and_q_of_drafted()
        self.children = [_children(drafted) for drafted in self.group.drafted]

    def parent(self, row: int, node: int, mass: float = 1.0) -> _Parent | None:
        """A node as a parent; None for a leaf."""
        children = self.children[row][node + 1]
        return _Parent(row, node, children, mass) if children else None

    def ratio(self, parent: _Parent) -> tuple[float, float]:
        """The p(x) and q(x) of a parent's next child, as the refused ones leave them."""
        child = parent.child
        return self.p[parent.row][child] / parent.total, self.q[parent.row][child] / parent.rest

    def refuse(self, parents: Sequence[_Parent]) -> list[float]:
        """Refuse the child that each parent judges now, and go on to its next one if it has any.

        Returns:
            S = Σ(a p - q)+ of each parent.
        """
        drawn = [parent for parent in parents if self._q_rows(parent.row) is not None]
        sums = iter(self._refuse_drawn(drawn) if drawn else [])
        return [self._refuse_certain(parent) if self._q_rows(parent.row) is None else next(sums) for parent in parents]

    def own_weights(self, nodes: Sequence[int], parents: Sequence[_Parent | None]) -> Tensor:
        """Weights [B, V] of each row's own token, not normalized: of p after a leaf, else of the last residual.

        Args:
            nodes: each row's last node that stands.
            parents: the same as parents whose last child is refused as well; None for a leaf.
        """
        places = [start + node + 1 for start, node in zip(self.group.starts, nodes, strict=True)]
        refused = [parent for parent in parents if parent is not None]
        if not refused:
            return self.group.probs(places)
        p = self._current(places, parents)
        drawn = {parent.row for parent in refused if self._q_rows(parent.row) is not None}
        if drawn:
            nothing = torch.zeros(p.shape[1], device=p.device)
            with_q = [None if parent is None or parent.row not in drawn else parent for parent in parents]
            q = [nothing if parent is None else self._q_of(parent).to(p.device) for parent in with_q]
            scale = [1.0 if parent is None else parent.mass / parent.total for parent in with_q]
            weights = _excess(p, torch.stack(q), scale)
        else:
            weights = p.clone()
        for parent in refused:
            if parent.row not in drawn:  # without chance q is one-hot at each refused token
                tokens = self._tokens(parent.row)
                refused_tokens = [tokens[child] for child in parent.children]
                weights[parent.row, sent(refused_tokens, torch.int64, p.device)] = 0.0
        # Where p equals q a refusal comes from the last bits alone, and nothing is left over: draw from p.
        empty = weights.sum(dim=-1, keepdim=True) <= 0
        return torch.where(empty, p, weights)

    def _refuse_certain(self, parent: _Parent) -> float:
        """The same of a draft without chance: (a p - q)+ is a p everywhere but at the refused token."""
        p, _ = self.ratio(parent)
        gain = parent.mass * (1.0 - p)
        if not parent.is_last:
            left = parent.total - self.p[parent.row][parent.child]
            parent.num_refused += 1
            parent.total = max(left, self.p[parent.row][parent.child], float_info.min)
        return gain

    def _refuse_drawn(self, parents: Sequence[_Parent]) -> list[float]:
        """The same of children that were drawn by chance."""
        places = [self.group.starts[parent.row] + parent.node + 1 for parent in parents]
        p = self._current(places, parents)
        q = self._q_of_many(parents).to(p.device)
        rests = [parent.rest for parent in parents]
        rescaled = q if all(rest == 1 for rest in rests) else q / sent(rests, q.dtype, p.device)[:, None]
        left = _excess(p, rescaled, [parent.mass / parent.total for parent in parents])
        sums = left.sum(dim=-1, dtype=torch.float64)
        going = [i for i, parent in enumerate(parents) if not parent.is_last]
        if not going:
            masses_left: list[float] = sums.tolist()
            return masses_left
        following = [parents[i].children[parents[i].num_refused + 1] for i in going]
        tokens = [self._tokens(parents[i].row)[child] for i, child in zip(going, following, strict=True)]
        at = sent(going, torch.int64, p.device)
        of_next = left[at, sent(tokens, torch.int64, p.device)].double()
        q_sums = q[at].sum(dim=-1, dtype=torch.float64)
        # One copy, so that a GPU is waited for once.
        gains = torch.cat((sums, of_next, q_sums)).tolist()
        for j, i in enumerate(going):
            parent, gain = parents[i], gains[i]
            if gain > 0:  # else p equals q, and the refusal comes from the last bits alone
                parent.weights, parent.total = left[i], gain
                self.p[parent.row][following[j]] = gains[len(parents) + j]
            parent.num_refused += 1
            q_x, refused = self.q[parent.row], parent.children[: parent.num_refused]
            rest = gains[len(parents) + len(going) + j] - sum(q_x[child] for child in refused)
            parent.rest = max(rest, q_x[parent.child])
        return gains[: len(parents)]

    def _current(self, places: list[int], parents: Sequence[_Parent | None]) -> Tensor:
        """Rows [n, V] of p at places, to be read only, as the refused children leave them."""
        p = self.group.probs(places)
        weights = [None if parent is None else parent.weights for parent in parents]
        changed = {i: residual for i, residual in enumerate(weights) if residual is not None}
        if changed:
            p = p.clone()
            p[sent([*changed], torch.int64, p.device)] = torch.stack(list(changed.values()))
        return p

    def _tokens(self, row: int) -> tuple[int, ...]:
        return self.group.rows[row].guesses.drafted.tokens

    def _q_rows(self, row: int) -> Tensor | None:
        return self.group.rows[row].guesses.q

    def _q_of(self, parent: _Parent) -> Tensor:
        """[V], the q that its next child was drawn from; refused ones keep their place, where p is 0 already."""
        q = self._q_rows(parent.row)
        assert q is not None, "this row was drawn by chance"
        return q[parent.child] if parent.rest == 1 else q[parent.child] / parent.rest

    def _q_of_many(self, parents: Sequence[_Parent]) -> Tensor:
        """The q of several parents, each as the draft gave it, [n, V]."""
        nodes: dict[int, list[int]] = {}
        for parent in parents:
            nodes.setdefault(parent.row, []).append(parent.child)
        parts = []
        for row, children in nodes.items():
            q = self._q_rows(row)
            assert q is not None, "these rows were drawn by chance"
            first, last = children[0], children[-1]
            is_slice = children == list(range(first, last + 1))  # no copy
            parts.append(q[first : last + 1] if is_slice else q[sent(children, torch.int64, q.device)])
        return together(parts)


def rejection(group: RowGroup) -> list[Verdict]:
    """Recursive rejection without replacement, rows side by side; on a chain, speculative sampling."""
    residuals, uniforms = _Residuals(group), group.acceptance_uniforms()
    paths: list[list[int]] = [[] for _ in group.rows]
    ends = [residuals.parent(row, CONTEXT_END) for row in range(len(group.rows))]
    going = [parent for parent in ends if parent is not None]
    while going:
        refused = []
        for begin in going:
            parent: _Parent | None = begin
            while parent is not None:
                p, q = residuals.ratio(parent)
                if not uniforms[parent.row][parent.child] * q < p:
                    break
                paths[parent.row].append(parent.child)
                parent = residuals.parent(parent.row, parent.child)
            ends[begin.row] = parent
            if parent is not None and not parent.is_last:
                refused.append(parent)
        if refused:
            residuals.refuse(refused)
        going = refused
    return _verdicts(residuals, paths, ends)


def traversal(group: RowGroup) -> list[Verdict]:
    """Traversal verification: the first node in post-order whose uniform is below its a stands, with its path."""
    residuals, uniforms = _Residuals(group), group.acceptance_uniforms()
    chances, parents = _chances(residuals)
    paths: list[Sequence[int]] = []
    ends = []
    for row, drafted in enumerate(group.drafted):
        tested = (node for node in _post_order(residuals.children[row]))
        stands = (node for node in tested if node == CONTEXT_END or uniforms[row][node] < chances[row][node])
        last = next(stands)
        paths.append(drafted.path(last))
        ends.append(parents.get((row, last)))
    return _verdicts(residuals, paths, ends)


def _chances(residuals: _Residuals) -> tuple[list[list[float]], dict[tuple[int, int], _Parent]]:
    """Each row's a of every node once all its children are refused, and all parents, with one child left to refuse."""
    chances = [[1.0] * len(drafted) for drafted in residuals.group.drafted]
    parents: dict[tuple[int, int], _Parent] = {}
    roots = (residuals.parent(row, CONTEXT_END) for row in range(len(chances)))
    going = [root for root in roots if root is not None]
    while going:
        active = []
        for begin in going:
            parent: _Parent | None = begin
            while parent is not None:  # down along first children: their a depends on no refusal
                if not (parent.node == CONTEXT_END and parent.is_last):
                    active.append(parent)
                parents[parent.row, parent.node] = parent
                p, q = residuals.ratio(parent)
                chance = chances[parent.row][parent.child] = min(1.0, parent.mass * p / q)
                parent = residuals.parent(parent.row, parent.child, chance)
        is_last = [parent.is_last for parent in active]
        for parent, gain, last in zip(active, residuals.refuse(active), is_last, strict=True):
            total = gain + 1.0 - parent.mass
            mass = gain / total if total > 0 else 1.0
            if last:  # its own token needs the a that it had before
                chances[parent.row][parent.node] = mass
            else:
                parent.mass = mass
        going = [parent for parent, last in zip(active, is_last, strict=True) if not last]
    return chances, parents


def _verdicts(residuals: _Residuals, paths: Sequence[Sequence[int]], ends: Sequence[_Parent | None]) -> list[Verdict]:
    """Verdicts with own tokens drawn from p, or from what the refused children after each path leave of it."""
    weights = residuals.own_weights([path[-1] if path else CONTEXT_END for path in paths], ends)
    own = residuals.group.own_tokens([len(path) for path in paths], weights)
    return [Verdict(tuple(path), token) for path, token in zip(paths, own, strict=True)]


def _children(drafted: Drafted) -> list[list[int]]:
    """The nodes after each place: after the context's end first, then after every node."""
    if drafted.is_chain:
        return [*([node] for node in range(len(drafted))), []]
    children: list[list[int]] = [[] for _ in range(len(drafted) + 1)]
    for node, parent in enumerate(drafted.parents):
        children[parent + 1].append(node)
    return children


def _post_order(children: Sequence[Sequence[int]]) -> list[int]:
    """All nodes, each after those below it and siblings in their order; the context's end comes last."""
    # The reverse of a walk that visits parents before children and siblings from the last to the first.
    visited, open_nodes = [], [CONTEXT_END]
    while open_nodes:
        node = open_nodes.pop()
        visited.append(node)
        open_nodes += children[node + 1]
    return visited[::-1]


def _excess(p: Tensor, q: Tensor, scale: Sequence[float]) -> Tensor:
    """(scale p - q)+ [n, V] from p, q [n, V] float32 and scale [n]."""
    return (p * sent(scale, p.dtype, p.device)[:, None]).sub_(q).clamp_(min=0)
