"""Base of drafters whose head drafts token by token from its own outputs: EAGLE and multi-token prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import DraftRow, Guesses, Resources
from specdec_cli.drafters.feature_head import HeadDrafter
from specdec_cli.drafters.growth import Growth
from specdec_cli.drafters.rounds import check_guess

if TYPE_CHECKING:
    from specdec_cli.lm.heads.chain_sequences import ChainSequences


class ChainDrafter(HeadDrafter["ChainSequences"]):
    """Guesses greedy chains in one CUDA graph where the head is recorded, and everything else round by round.

    Args:
        model: hub id or folder of the head.
    """

    @property
    def graphs_obstacle(self) -> str | None:
        """Why its head records no graphs beside a target that does; None where it does, or the target has none."""
        return None if self._sequences is None else self._sequences.graphs_obstacle

    def load_sequences(self, resources: Resources) -> ChainSequences:
        """The sequences of the head; see `load`."""
        from specdec_cli.lm.heads.chain_sequences import ChainSequences

        assert resources.target is not None, "a head is loaded for a target"
        return ChainSequences(self.load_heads(resources), resources.target, self._name, len(self.taps))

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """Up to k tokens per row, or a tree of that depth.

        Raises:
            RunError: what it guessed before, unread, was no token.
        """
        unread, self.held.last_guess = self.held.last_guess, None
        check_guess(unread, self._name, "try --dtype float32, or another draft if it is float32 already")
        return super().propose(rows)

    def _guess(self, drafts: Sequence[Growth], longest: int) -> None:
        """Guess greedy chains in one graph."""
        from specdec_cli.lm.heads.head_graphs import GreedyRow

        if not self.held.is_recorded:
            return
        chains = [draft for draft in drafts if draft.is_plain and not draft.is_drawn and self._can_begin(draft.row)]
        rows = [
            GreedyRow(draft.row.handle, draft.row.context, draft.row.features, draft.most_depth(longest))
            for draft in chains
        ]
        found = self.held.guess(rows, self._num_tokens) if rows else None
        if found is not None:
            for draft, tokens in zip(chains, found.tokens, strict=True):
                draft.take_chain(tokens, found.unread, None)

    def _can_begin(self, row: DraftRow) -> bool:
        """Whether there is, or comes with the row, what a first guess follows from."""
        return self.held.can_draft(row.handle) or (row.features is not None and len(row.features) > 0)
