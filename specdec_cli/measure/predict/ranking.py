"""Limits of a draft's ranking of tokens, which say whether to train it, to select among its tokens or to draft trees.

A chain takes the likeliest token, a tree some of the next ones, and an oracle the right one wherever it is among the
first ORACLE_WIDTH. All of them come from the ranks in one trace and draft equally deep.
"""

from __future__ import annotations

import numpy as np

from specdec_cli.document import Count, Interval, Result, Share
from specdec_cli.drafted import CONTEXT_END
from specdec_cli.measure.predict.draft_trace import GuessTrace
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.measure.predict.tree_replay import acceptance_by_rank, replay_oracle, replay_tree
from specdec_cli.measure.predict.tree_search import TreeSearch

RECALLS = (1, 4, 16)
ORACLE_WIDTH = 16
BUDGETS = (8, 16, 32)


class RankingResult(Result):
    """A draft's ranking along a target's text at temperature 0.

    `recall` is, by number, the fraction of the text's tokens among so many of the draft's likeliest ones. The lengths
    are acceptance lengths of drafting at most `depth` tokens one behind another: of the chain of likeliest tokens, of
    the best static tree by number of nodes, and of an oracle that chooses among the first 16 everywhere.
    """

    depth: Count
    recall: dict[str, Share]
    chain: Interval
    trees: dict[str, Interval]
    oracle: Interval


def ranking_of(trace: Trace, draft: str, depth: int) -> RankingResult | None:
    """The limits of a draft's ranking.

    Args:
        trace: a target's text, with this draft.
        draft: its name in the trace.
        depth: most tokens that a step drafts one behind another.

    Returns:
        None for a sampled text and a draft without ranks, as of `ngram`.
    """
    traced = trace.draft(draft)
    if not trace.is_greedy or isinstance(traced, GuessTrace) or traced.rank is None:
        return None
    by_rank = acceptance_by_rank(trace, draft)
    search, chain = TreeSearch(by_rank, BUDGETS[-1], depth), tuple(range(CONTEXT_END, depth - 1))
    return RankingResult(
        depth=depth,
        recall={str(num): float(by_rank[:num].sum()) for num in RECALLS},
        chain=replay_tree(trace, draft, chain).acceptance_length(),
        trees={str(budget): _longest(trace, draft, search, chain, budget) for budget in BUDGETS},
        oracle=replay_oracle(trace, draft, ORACLE_WIDTH, depth).acceptance_length(),
    )


def _longest(trace: Trace, draft: str, search: TreeSearch, chain: tuple[int, ...], budget: int) -> Interval:
    """The best acceptance length of the program's trees of so many nodes, by depth; the chain is one of them."""
    parents = {search.best(budget, level)[0] for level in range(1, len(chain) + 1)} - {()} | {chain[:budget]}
    lengths = [replay_tree(trace, draft, tree).acceptance_length() for tree in sorted(parents)]
    return max(lengths, key=lambda length: np.nan_to_num(length.median))
