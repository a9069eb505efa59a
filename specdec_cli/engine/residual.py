"""Verification rules that compare p with q: recursive rejection, and traversal, which is block verification on a chain.

Both judge the children of a node one after the other. Once a child is refused, its parent goes on with the residual
(a p - q)+ as its new p, and with a q that lacks the child: siblings were drawn without replacement. A draft without
chance is one-hot at each of its tokens, so a refusal takes the token alone out of p.

- Recursive rejection (Jeon et al. 2024, "Recursive speculative decoding"; Chen et al. 2024, "Sequoia") walks down from
  the context's end: a child stands if u < p(x)/q(x), with the p and q that its refused siblings leave; a is 1.
- Traversal (Weng et al. 2025, "Traversal verification") goes up from the leaves, in post-order. Each node v carries
  a(v): 1 at the context's end, min(1, a(v) p(x)/q(x)) at a child. Once a child is refused, with S = Σ(a p - q)+,
  a(v) becomes S/(S + 1 - a(v)). A node that has no child left to try stands if u < a(v), with its whole path.

None of these numbers depends on chance, so they are computed before a node is tried, wave by wave. On a GPU they stay
there as tensors: the trees alone decide what is computed, and the host waits once, for the verdicts. On a CPU they are
arrays of numpy, whose operations on a few numbers take less time, and in rejection only a path's siblings are refused.

Letters: B rows, n nodes, N nodes and context ends, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from sys import float_info
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_cli.drafted import CONTEXT_END
from specdec_cli.engine.drafted_forest import NOT_DRAWN, Forest, Wave, forest_of
from specdec_cli.engine.verify import RowGroup, Verdict, from_p, together
from specdec_cli.transfer import sent


class Residuals:
    """The p and q of all rows' nodes, as refused children leave them.

    Args:
        forest: of the rows' drafted trees, of which one has a node at least.
        p: distributions [n, V] float32 at the rows' places.
        places: where in p it is decided what follows each node and context end.
        tokens: of all nodes [n] int64, where p is.
        p_drafted: p of these, each behind its parent [n].
        q: distributions [n, V] that nodes were drawn from; None where none was drawn by chance.
        uniforms: by which each node is tried [n] float64; on a CPU as numpy.
        is_joint: whether a node's own a weighs what follows it (traversal), or a is 1 everywhere (rejection).
        is_there: whether each node is there [n] bool, if some may be missing of those that were drawn by chance: last
            siblings, and what is behind these; None on a CPU.

    Attributes:
        p: p(x) of each node [n] float64, a refused sibling's successor with the weight that the refusal leaves it.
        q: q(x) of each node [n] float64, 1 where it was drafted without chance.
        mass: a of each node and context end [N] float64, as the refused children leave it.
        total: sums of what these leave of p [N] float64.
        rest: what q holds besides them [N] float64.
        limit: a node stands where u·factor is below it [N] float64.
        factor: of the uniform numbers [N] float64.
    """

    def __init__(
        self,
        forest: Forest,
        p: Tensor,
        places: Sequence[int],
        tokens: Tensor,
        p_drafted: Tensor,
        q: Tensor | None,
        uniforms: Any,
        is_joint: bool,
        is_there: Tensor | None = None,
    ) -> None:
        self.forest, self._p, self._places, self._tokens = forest, p, places, tokens
        self._is_joint, self._is_host, self.uniforms, self._is_there = is_joint, forest.is_host, uniforms, is_there
        self._xp: Any = np if self._is_host else torch
        self.p = self._numbers(p_drafted.double())
        ones = self._numbers(p.new_ones(6, len(forest.children), dtype=torch.float64))
        self.mass, self.total, self.rest, self.limit, self.factor, self._q_refused = ones
        self._q_refused -= 1.0
        self.q, self._q_rows = self._xp.ones_like(self.p), q
        # p [V] of parents as refused children leave it, not normalized: rows of several tensors, and which is whose.
        self._weights, self._left = list[Tensor](), dict[int, tuple[int, int]]()
        self._look_up_q()
        if is_there is not None:  # a node that is missing never stands
            self.p, self.q = torch.where(is_there, self.p, 0.0), torch.where(is_there, self.q, 1.0)
        with np.errstate(all="ignore"):
            self._refuse_all()

    def _refuse_all(self) -> None:
        """Judge all nodes, and refuse each for the sake of what comes after it."""
        parents = self.forest.parents
        path = set(range(self.forest.num, len(self.forest.children)))  # ends of paths so far
        for wave in self.forest.waves:
            self._reach(wave)
            drawn, certain = wave.drawn, wave.certain
            if self._is_host and not self._is_joint:
                passes = self.passes()
                for node in wave.nodes:
                    if parents[node] in path and passes[node]:
                        path = path - {parents[node]} | {node}
                drawn, certain = ([node for node in its if parents[node] in path] for its in (drawn, certain))
            if drawn:
                self._refuse_drawn(drawn)
            if certain:
                self._refuse_certain(certain)

    def _look_up_q(self) -> None:
        """Look q(x) up where nodes were drawn by chance."""
        if self._q_rows is not None:
            drawn = [node for node, place in enumerate(self.forest.q_places) if place != NOT_DRAWN]
            shape = len(drawn), self._p.shape[1]
            assert self._q_rows.shape == shape, "q has a row for each drafted token, as wide as p"
            (at,) = self.forest.at(drawn)
            q = self._q_rows.gather(1, self._tokens[torch.as_tensor(at)][:, None])
            self.q[at] = self._numbers(q[:, 0].double())

    def _reach(self, wave: Wave) -> None:
        """Judge nodes as their refused siblings leave p and q."""
        p, q = self.p[wave.at] / self.total[wave.above], self.q[wave.at] / self.rest[wave.above]
        if not self._is_joint:
            self.limit[wave.at], self.factor[wave.at] = p, q
            return
        for begin, end in wave.runs:
            mass = self.mass[wave.above[begin:end]] * p[begin:end] / q[begin:end]
            mass = np.minimum(mass, 1.0) if self._is_host else mass.clamp(max=1.0)
            self.mass[wave.at[begin:end]] = self.limit[wave.at[begin:end]] = mass

    def _refuse_certain(self, nodes: Sequence[int]) -> None:
        """Refuse nodes that were drafted without chance: (a p - q)+ is a p everywhere but at the refused token.

        As `_refuse_drawn` and `_lower` it takes each parent's judged child, first those that a sibling comes after.
        """
        at, above, after = self.forest.at(nodes, *self._parents_and_next(nodes))
        num = len(after)
        gain = self.mass[above] * (1.0 - self.p[at] / self.total[above])
        left = self._xp.maximum(self.total[above[:num]] - self.p[at[:num]], self.p[after])
        self.total[above[:num]] = self._xp.where(left > float_info.min, left, float_info.min)
        self._lower(above, num, gain, at, after)

    def _refuse_drawn(self, nodes: Sequence[int]) -> None:
        """Refuse nodes that were drawn by chance."""
        parents, following = self._parents_and_next(nodes)
        at, above, after = self.forest.at(nodes, parents, following)
        p, q, num = self._current(parents), self._q_of([self.forest.q_places[node] for node in nodes]), len(following)
        left = self._excess(p, q, above)
        sums = self._numbers(left.sum(dim=-1, dtype=torch.float64))
        if num:
            its, has_rest = above[:num], sums[:num] > 0  # else p equals q, and the refusal comes from the last bits
            if self._is_there is not None:
                has_rest = has_rest & self._is_there[after]
            self._left |= {parent: (len(self._weights), i) for i, parent in enumerate(parents[:num])}
            self._weights.append(self._where(has_rest, left[:num], p[:num]))
            self.total[its] = self._xp.where(has_rest, sums[:num], self.total[its])
            tokens = self._tokens[torch.as_tensor(after)][:, None]
            of_next = self._numbers(left[:num].gather(1, tokens)[:, 0].double())
            self.p[after] = self._xp.where(has_rest, of_next, self.p[after])
            self._q_refused[its] += self.q[at[:num]]
            rest = self._numbers(q[:num].sum(dim=-1, dtype=torch.float64)) - self._q_refused[its]
            self.rest[its] = self._if_there(after, self._xp.maximum(rest, self.q[after]), self.rest[its])
        self._lower(above, num, sums, at, after)

    def _lower(self, above: Any, num: int, gain: Any, at: Any, after: Any) -> None:
        """Give parents the a that a refused child leaves, by S = Σ(a p - q)+; `num` of them have a child left."""
        if self._is_joint:
            total = gain + 1.0 - self.mass[above]
            mass = self._xp.where(total > 0, gain / total, 1.0)
            self.limit[above] = self._if_there(at, mass, self.limit[above])
            # Behind the last child, own tokens need the a before.
            self.mass[above[:num]] = self._if_there(after, mass[:num], self.mass[above[:num]])

    def _if_there(self, nodes: Any, new: Any, old: Any) -> Any:
        """Values [n] where nodes are there, and those before where they are missing."""
        return new if self._is_there is None else torch.where(self._is_there[nodes], new, old)

    def own_weights(self, last: Any) -> Tensor:
        """Weights [B, V] of each row's own token, not normalized: of p after a leaf, else of the last residual.

        Args:
            last: number of each row's last node that stands, or of its context's end [B].
        """
        weights = p = self._current(last.tolist()) if self._is_host else self._current_of(last)
        place = self.forest.last_q[last]
        has_q = place != NOT_DRAWN
        if self._is_there is not None:
            has_q = has_q & self._is_there[self.forest.first_children[last]]
        if self._q_rows is not None and not (self._is_host and not has_q.any()):
            left = self._excess(p, self._q_of(self._xp.maximum(place, 0 * place)), last)
            weights = self._where(has_q, left, p)
        if NOT_DRAWN in self.forest.q_places:
            weights = self._without_refused(weights, last)
        # Where p equals q a refusal comes from the last bits alone, and nothing is left over: draw from p.
        return p if weights is p else torch.where(weights.sum(dim=-1, keepdim=True) <= 0, p, weights)

    def _without_refused(self, weights: Tensor, last: Any) -> Tensor:
        """Weights [B, V] without the tokens of refused nodes that were drafted without chance: q is one-hot there."""
        nums, nodes = self.forest.certain
        at, has_some = self._tokens[torch.as_tensor(nodes[last])], torch.as_tensor(nums[last] > 0)[:, None]
        return weights.scatter(1, at, torch.where(has_some, 0.0, weights.gather(1, at)))

    def _parents_and_next(self, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
        """The parents of nodes, and the siblings after those that have one."""
        forest = self.forest
        return [forest.parents[node] for node in nodes], [
            forest.next[node] for node in nodes if forest.is_followed(node)
        ]

    def _current(self, parents: Sequence[int]) -> Tensor:
        """Rows [n, V] of p behind parents, to be read only, as the refused children leave them."""
        p = self.forest.rows_of(self._p, [self._places[parent] for parent in parents])
        changed = {i: self._left[parent] for i, parent in enumerate(parents) if parent in self._left}
        if changed:
            p = p.clone()
            p[torch.as_tensor(self.forest.at([*changed])[0])] = torch.stack(
                [self._weights[number][row] for number, row in changed.values()]
            )
        return p

    def _current_of(self, last: Tensor) -> Tensor:
        """The same [B, V] of nodes that the device has chosen."""
        (place,) = self.forest.at(self._places)
        p = self._p[place[last]]
        for number, weights in enumerate(self._weights):
            left = [self._left.get(node, (-1, -1)) for node in range(len(self._places))]
            (rows,) = self.forest.at([row if its == number else -1 for its, row in left])
            row = rows[last]
            p = torch.where((row >= 0)[:, None], weights[row.clamp(min=0)], p)
        return p

    def _excess(self, p: Tensor, q: Tensor, parents: Any) -> Tensor:
        """(a p - q)+ [n, V] of parents [n] with the p and q given [n, V], normalized."""
        rest = self.rest[parents]
        if not (self._is_host and (rest == 1).all()):
            q = q / self._column(rest)
        return (p * self._column(self.mass[parents] / self.total[parents])).sub_(q).clamp_(min=0)

    def _where(self, condition: Any, left: Tensor, p: Tensor) -> Tensor:
        """Rows [n, V] of `left` where a condition [n] holds, else of p."""
        if self._is_host and condition.all():  # no copy
            return left
        return torch.where(torch.as_tensor(condition)[:, None], left, p)

    def _q_of(self, places: Any) -> Tensor:
        """Rows [n, V] of q, to be read only."""
        assert self._q_rows is not None, "these nodes were drawn by chance"
        if isinstance(places, Tensor):
            return self._q_rows[places]
        return self.forest.rows_of(self._q_rows, places)

    def passes(self) -> Any:
        """Whether each node passes its own test [n] bool."""
        num = self.forest.num
        return self.uniforms * self.factor[:num] < self.limit[:num]

    def last(self) -> Any:
        """Number of each row's last node that stands, or of its context's end [B]."""
        num, stands = self.forest.num, self._xp.ones_like(self.limit) > 0
        stands[:num] = self.passes()
        if not self._is_joint:
            # A sibling that passes stands before those after it, and a node with its whole path alone.
            fails = ~stands | (self.forest.depths == 0)
            stands[:num] &= fails[self.forest.earlier].all(1)
            stands[:num] = stands[self.forest.paths].all(1)
        return self.forest.order[self.forest.rows, (stands[self.forest.order] * 1).argmax(1)]

    def _numbers(self, values: Tensor) -> Any:
        """Float64 of the device, as numpy on a CPU."""
        return values.numpy() if self._is_host else values

    def _column(self, numbers: Any) -> Tensor:
        """The same as a column [n, 1] float32."""
        return torch.as_tensor(numbers).float()[:, None]


def rejection(group: RowGroup) -> list[Verdict]:
    """Recursive rejection without replacement; on a chain, speculative sampling."""
    return _verdicts(group, is_joint=False)


def traversal(group: RowGroup) -> list[Verdict]:
    """Traversal verification."""
    return _verdicts(group, is_joint=True)


def _verdicts(group: RowGroup, is_joint: bool) -> list[Verdict]:
    """The first node in post-order that stands, and an own token from p or from what refused children leave of it."""
    if not any(group.tokens):
        return from_p(group)
    p, nodes = (
        group.p.dense(),
        [[*range(start + 1, start + 1 + len(row))] for start, row in zip(group.starts, group.tokens, strict=True)],
    )
    forms = tuple((row.guesses.drafted.parents, row.guesses.q is not None) for row in group.rows)
    forest = forest_of(forms, is_joint, None if p.is_cpu else p.device)
    uniforms = [*chain.from_iterable(group.acceptance_uniforms())]
    q = [row.guesses.q for row in group.rows if row.guesses.q is not None and row.guesses.drafted]
    residuals = Residuals(
        forest,
        p,
        [*chain.from_iterable(nodes), *group.starts],
        sent([*chain.from_iterable(group.tokens)], torch.int64, p.device),
        group.at_drafted(p),
        together(q).to(p.device) if q else None,
        np.array(uniforms) if p.is_cpu else sent(uniforms, torch.float64, p.device),
        is_joint,
    )
    last = residuals.last()
    own = group.own_tokens(forest.depths[last], forest.most_depth, residuals.own_weights(last))
    results = last, own, residuals.q > 0
    if isinstance(last, Tensor):  # in one copy, so that a GPU is waited for once
        nodes, tokens, are_right = torch.stack((*results[:2], results[2].all().expand_as(last))).tolist()
    else:
        nodes, tokens, are_right = (its.tolist() for its in results)
    assert all(are_right), "a drafted token has a probability under the q it was drawn from"
    return [
        Verdict(drafted.path(node - begin if node < forest.num else CONTEXT_END), token)
        for drafted, begin, node, token in zip(group.drafted, forest.begins, nodes, tokens, strict=True)
    ]
