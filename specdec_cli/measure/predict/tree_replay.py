"""Replay of a draft's static tree at temperature 0, from the ranks in a trace alone.

The target follows its own likeliest tokens through the tree (`verify`'s walk), and these are the trace's text. A node's
children are the likeliest tokens of the draft in descending order, so the walk goes on to the child whose place among
its siblings is the rank of the next token, and ends where there is no such child. As for chains, every step begins
behind the last one's own token.

Where several tokens have the same probability and a node has children for only some of them, the drafter may choose
others than the ranks say; that happens with drafts in half precision.

Letters: B prompts, n the longest output, N positions of all outputs, K depths that were traced at each, L the tree's
depth, R ranks below RANK_BEYOND.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec_cli.drafted import CONTEXT_END, MOST_NODES, Drafted
from specdec_cli.errors import UsageError
from specdec_cli.measure.predict.draft_trace import RANK_BEYOND, DepthTrace, UInt8Array
from specdec_cli.measure.predict.replay import Replay, tally
from specdec_cli.measure.predict.starts import IntArray, Starts, Steps
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.measure.stats import FloatArray, Interval


@dataclass(frozen=True, slots=True, eq=False)
class TreeReplay:
    """Counts of decoding each prompt with one static tree.

    Args:
        parents: of the tree's nodes.
        by_depth: counts by depth: what a chain's replay counts for drafted tokens, here for the depths of the tree.
        num_nodes: [B] drafted nodes. Where fewer tokens can occur than a node has children, the engine drafts fewer.
        reached_by_rank: [B, R] how often a step had a node of this rank among the children to choose from; as the
            engine counts, not behind an accepted token that ends the output.
        accepted_by_rank: [B, R] how often it accepted that node.
    """

    parents: tuple[int, ...]
    by_depth: Replay
    num_nodes: FloatArray
    reached_by_rank: FloatArray
    accepted_by_rank: FloatArray

    @property
    def depth(self) -> int:
        """Nodes on the longest path."""
        return self.by_depth.k

    def acceptance_length(self, task: str | None = None) -> Interval:
        """1 + accepted tokens per drafting step, of all prompts or one task's."""
        return self.by_depth.acceptance_length(task)

    def tokens_per_step(self, task: str | None = None) -> Interval:
        """Emitted tokens per step, steps without a draft and cut ones included."""
        return self.by_depth.tokens_per_step(task)

    def rates_by_depth(self) -> list[Interval]:
        """Fraction of the steps with a tree so deep that accepted a node at depth 1…L."""
        return self.by_depth.marginal_rates()

    def rates_by_rank(self) -> list[float | None]:
        """Acceptance of the first child, the second, and so on; None where no step reached such a child."""
        pairs = zip(self.accepted_by_rank.sum(axis=0), self.reached_by_rank.sum(axis=0), strict=True)
        rates = [float(accepted / reached) if reached else None for accepted, reached in pairs]
        num = max((rank + 1 for rank, rate in enumerate(rates) if rate is not None), default=0)
        return rates[:num]


def replay_tree(trace: Trace, draft: str, parents: Sequence[int]) -> TreeReplay:
    """Counts of decoding with a static tree, exact as the walk has no chance in it.

    Args:
        trace: a target's text at temperature 0, with this draft model.
        draft: its name in the trace.
        parents: the node before each node, as in `Drafted`; siblings in descending order of the draft's probability.

    Raises:
        UsageError: a sampled text, a draft without ranks in the trace, or parents that are no tree.
    """
    if not trace.is_greedy:
        raise UsageError("the trace was sampled, and a trace predicts trees at temperature 0 alone", "trace again")
    ranks = trace.ranks(draft)
    tree = _StaticTree.of(parents)
    starts = Starts.of(trace, draft, "greedy", tree.depth)
    choices = _choices(starts, ranks, tree.depth)
    walked, steps = _walk(starts, tree, choices)
    visits = starts.visits(steps)
    by_depth = tally(starts, tree.depth, [(steps, visits)])
    num_nodes = (visits * tree.num_nodes[steps.drafted]).sum(axis=1)
    return TreeReplay(tree.parents, by_depth, num_nodes, *_by_rank(starts, tree, choices, walked, steps, visits))


def acceptance_by_rank(trace: Trace, draft: str) -> FloatArray:
    """Fraction [R] of output positions whose token has rank 0, 1, …: Sequoia's acceptance vector.

    It is the mean over all positions that a step can draft, wherever the steps of one tree begin; of a draft with
    distributions by depth, over all depths that were traced alike.

    Args:
        trace: a target's text with this draft model.
        draft: its name in the trace.

    Raises:
        UsageError: a draft without ranks in the trace.
    """
    ranks = trace.ranks(draft)
    starts = Starts.of(trace, draft, "auto", 1)
    depth = 1 if ranks.ndim == 1 else starts.draft.most_depth or 1
    places = np.arange(starts.contexts.shape[1])[:, None] + np.arange(depth)
    is_drafted = (starts.room[..., None] > np.arange(depth)) & (places >= 1) & (places[:, :1] >= 1)
    is_drafted &= places < starts.lengths[:, None, None]
    found = _choices(starts, ranks, depth)[is_drafted]
    return np.bincount(found, minlength=RANK_BEYOND + 1)[:RANK_BEYOND] / max(len(found), 1)


@dataclass(frozen=True, slots=True, eq=False)
class _StaticTree:
    """A tree as tables. State 0 is the context's end, state i + 1 is node i, and the last one is outside the tree.

    Args:
        parents: of the nodes.
        depth: L.
        next_state: [states, RANK_BEYOND + 1] the state that a token of each rank leads to.
        num_children: [states].
        num_nodes: [L + 1] nodes that are at most so deep.
    """

    parents: tuple[int, ...]
    depth: int
    next_state: IntArray
    num_children: IntArray
    num_nodes: IntArray

    @classmethod
    def of(cls, parents: Sequence[int]) -> _StaticTree:
        if not 1 <= len(parents) <= MOST_NODES:
            raise UsageError(f"a tree of `{len(parents)}` nodes cannot be predicted", f"give 1 to {MOST_NODES} nodes")
        drafted = Drafted(tuple(range(len(parents))), tuple(parents))
        outside = len(parents) + 1
        next_state = np.full((outside + 1, RANK_BEYOND + 1), outside, dtype=np.int64)
        num_children = np.zeros(outside + 1, dtype=np.int64)
        for node in range(CONTEXT_END, len(parents)):
            children = drafted.children(node)
            num_children[node + 1] = len(children)
            next_state[node + 1, : len(children)] = np.array(children, dtype=np.int64) + 1
        depths = np.array([drafted.depth(node) for node in range(len(parents))])
        num_nodes = np.array([(depths <= depth).sum() for depth in range(depths.max() + 1)])
        return cls(tuple(parents), int(depths.max()), next_state, num_children, num_nodes)


def _choices(starts: Starts, ranks: UInt8Array, depth: int) -> IntArray:
    """Ranks [B, n, depth] of the tokens behind every start, RANK_BEYOND behind an output's end.

    Args:
        starts: of the trace.
        ranks: [N], of each position wherever a step begins, or [N, K] of the tokens behind it.
        depth: how many tokens.
    """
    if ranks.ndim > 1:
        its = [starts.padded(ranks[:, i], RANK_BEYOND) for i in range(depth)]
    else:
        padded = np.pad(starts.padded(ranks, RANK_BEYOND), ((0, 0), (0, depth)), constant_values=RANK_BEYOND)
        its = [padded[:, i : i + padded.shape[1] - depth] for i in range(depth)]
    return np.stack(its, axis=-1).astype(np.int64)


def _walk(starts: Starts, tree: _StaticTree, choices: IntArray) -> tuple[IntArray, Steps]:
    """The state [B, n, L+1] at every depth of a walk from every start, and the steps' outcomes."""
    num, n, _ = choices.shape
    states = np.zeros((num, n, tree.depth + 1), dtype=np.int64)
    for depth in range(1, tree.depth + 1):
        states[..., depth] = tree.next_state[states[..., depth - 1], choices[..., depth - 1]]
    asked = np.minimum(starts.room, tree.depth)
    limit = starts.draft.limit if isinstance(starts.draft, DepthTrace) else None
    drafted = asked if limit is None else np.minimum(asked, limit)
    survival = (states <= len(tree.parents)).astype(np.float64)
    survival[np.arange(tree.depth + 1) > drafted[..., None]] = 0.0
    return states, Steps(asked, drafted, survival)


def _by_rank(
    starts: Starts, tree: _StaticTree, choices: IntArray, states: IntArray, steps: Steps, visits: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """How often each prompt's steps reached a child of each rank, and accepted it: [B, R] both."""
    num, n, _ = choices.shape
    prompts = np.broadcast_to(np.arange(num)[:, None], (num, n))
    by_children, accepted = np.zeros((num, RANK_BEYOND + 1)), np.zeros((num, RANK_BEYOND + 1))
    for depth in range(1, tree.depth + 1):
        is_decided = (steps.drafted >= depth) & (np.arange(n) + depth - 1 < starts.lengths[:, None])
        reaches = visits * steps.survival[..., depth - 1] * is_decided
        np.add.at(by_children, (prompts, tree.num_children[states[..., depth - 1]]), reaches)
        stands = visits * steps.survival[..., depth]
        np.add.at(accepted, (prompts, choices[..., depth - 1]), stands)
    reached = by_children[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
    return reached, accepted[:, :-1]
