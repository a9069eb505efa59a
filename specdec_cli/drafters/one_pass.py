"""Growth of guesses whose distributions all come from one pass of the draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from specdec_cli.drafted import NOTHING, Drafted
from specdec_cli.drafters.growth import Growth
from specdec_cli.drafters.rounds import grow_deeper

if TYPE_CHECKING:
    from torch import Tensor


def grow_whole(
    drafts: Sequence[Growth],
    depths: Mapping[int, int],
    logits: Callable[[Sequence[Growth]], Tensor],
    num_tokens: int,
    name: str,
    confidence: Callable[[Sequence[Growth]], Tensor] | None = None,
) -> None:
    """Grow guesses to their full depth, whose logits may depend on the tokens before them.

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
    while growing := [one for one in drafts if not one.is_done and one.depth < depths[one.place]]:
        sure = None if confidence is None else confidence(growing)
        grow_deeper(growing, logits(growing), num_tokens, name, sure)


def grow_marginals(drafts: Sequence[Growth], rows: Mapping[int, Tensor], num_tokens: int, name: str) -> None:
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


def _is_alike(draft: Growth) -> bool:
    """Whether all nodes of a depth have the same likeliest children: those of a tree without penalties are searched."""
    from specdec_cli.sampling.chain import ChainRow, is_edited

    row = draft.row
    return draft.is_dynamic and not is_edited(
        ChainRow(row.params, row.context, row.num_prompt_tokens, NOTHING, row.stop_ids)
    )


def _grow_alike(draft: Growth, logits: Tensor, num_tokens: int, name: str) -> None:
    """Grow a tree by its likeliest nodes; each depth's distribution is computed once, however many nodes it has."""
    from specdec_cli.sampling.chain import ChainRow, LogitsError, distribution
    from specdec_cli.sampling.draft import likely_children

    row = draft.row
    # Without penalties and the like, the tokens before a place change nothing: any will do.
    chain = ChainRow(
        row.params, row.context, row.num_prompt_tokens, Drafted.chain([0] * (len(logits) - 1)), row.stop_ids
    )
    try:
        q = distribution(logits, [chain], num_tokens)
    except LogitsError as error:
        raise LogitsError(f"the draft `{name}`: {error.message}", draft.place, error.hint) from error
    sure = q.confidence().tolist() if row.p_min > 0 else [1.0] * len(logits)
    likely = likely_children(q, [row.most_nodes] * len(logits))
    for depth, children in enumerate(likely):
        is_unsure = row.p_min > 0 and sure[depth] < row.p_min
        if draft.is_done or depth in q.broken or is_unsure:
            break
        draft.grow_likely([children] * draft.num_ends)


def rows_at(growing: Sequence[Growth], rows: Mapping[int, Tensor]) -> Tensor:
    """The row of each guess's next depth, for every end.

    Args:
        growing: the guesses.
        rows: of each by its place, [depth, width].

    Returns:
        Rows [ends, width]; a view where there is one guess with one end.
    """
    import torch

    found = [rows[one.place][one.depth].expand(one.num_ends, -1) for one in growing]
    return found[0] if len(found) == 1 else torch.cat(found)
