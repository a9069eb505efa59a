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

import numpy as np

from specdec_cli.drafted import CONTEXT_END, MOST_NODES, Drafted
from specdec_cli.errors import UsageError
from specdec_cli.measure.predict.draft_trace import RANK_BEYOND, UInt8Array
from specdec_cli.measure.predict.replay import Replay, tally
from specdec_cli.measure.predict.starts import IntArray, Starts
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.measure.stats import FloatArray


def replay_tree(trace: Trace, draft: str, parents: Sequence[int]) -> Replay:
    """Counts by depth of decoding with a static tree, exact as the walk has no chance in it.

    What a chain's replay counts for drafted tokens, this one counts for the depths of the tree.

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
    if not 1 <= len(parents) <= MOST_NODES:
        raise UsageError(f"a tree of `{len(parents)}` nodes cannot be predicted", f"give 1 to {MOST_NODES} nodes")
    drafted = Drafted(tuple(range(len(parents))), tuple(parents))
    return _replay(trace, draft, ranks, drafted.max_depth, _next_states(drafted))


def replay_oracle(trace: Trace, draft: str, width: int, depth: int) -> Replay:
    """Counts by depth of an oracle that chooses each drafted token among the draft's likeliest ones.

    It is the full tree of `width` children at every node, which no budget allows: no choice among these tokens accepts
    more.

    Args:
        trace: a target's text at temperature 0, with this draft model.
        draft: its name in the trace.
        width: how many tokens it chooses among, at most RANK_BEYOND.
        depth: tokens drafted in a step.

    Raises:
        UsageError: a draft without ranks in the trace.
    """
    next_states = np.full((depth + 2, RANK_BEYOND + 1), depth + 1, dtype=np.int64)
    next_states[:depth, :width] = np.arange(1, depth + 1)[:, None]
    return _replay(trace, draft, trace.ranks(draft), depth, next_states)


def _replay(trace: Trace, draft: str, ranks: UInt8Array, depth: int, next_states: IntArray) -> Replay:
    """Counts by depth of the walk that these states describe."""
    starts = Starts(trace, draft, "greedy", depth)
    steps = starts.steps(depth, _walk(next_states, _choices(starts, ranks, depth)))
    return tally(starts, depth, [(steps, starts.visits(steps))])


def acceptance_by_rank(trace: Trace, draft: str) -> FloatArray:
    """Fraction [R] of output positions whose token has rank 0, 1, …: Sequoia's acceptance vector.

    It is the mean over all positions that a step can draft, wherever the steps of one tree begin; of a draft with
    distributions by depth, over all depths that were traced alike.

    Raises:
        UsageError: a draft without ranks in the trace.
    """
    ranks = trace.ranks(draft)
    starts = Starts(trace, draft, "auto", 1)
    depth = 1 if ranks.ndim == 1 else starts.draft.most_depth or 1
    places = np.arange(starts.contexts.shape[1])[:, None] + np.arange(depth)
    is_drafted = (starts.room[..., None] > np.arange(depth)) & (places >= 1) & (places[:, :1] >= 1)
    is_drafted &= places < starts.lengths[:, None, None]
    drafted_ranks = _choices(starts, ranks, depth)[is_drafted]
    return np.bincount(drafted_ranks, minlength=RANK_BEYOND + 1)[:RANK_BEYOND] / max(len(drafted_ranks), 1)


def _next_states(drafted: Drafted) -> IntArray:
    """The state [states, RANK_BEYOND + 1] that a token of each rank leads to.

    State 0 is the context's end, state i + 1 is node i, and the last state is outside the tree.
    """
    outside = len(drafted) + 1
    next_states = np.full((outside + 1, RANK_BEYOND + 1), outside, dtype=np.int64)
    for node in range(CONTEXT_END, len(drafted)):
        children = drafted.children(node)
        next_states[node + 1, : len(children)] = np.array(children, dtype=np.int64) + 1
    return next_states


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


def _walk(next_states: IntArray, choices: IntArray) -> FloatArray:
    """Whether [B, n, L+1] a walk from every start is still in the tree at each depth."""
    num, n, depth = choices.shape
    states = np.zeros((num, n, depth + 1), dtype=np.int64)
    for level in range(depth):
        states[..., level + 1] = next_states[states[..., level], choices[..., level]]
    return (states < len(next_states) - 1).astype(np.float64)
