"""Base of drafters whose head drafts token by token from its own outputs: EAGLE and multi-token prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import DraftRow, Guesses, Resources
from specdec_cli.drafters.feature_head import HeadDrafter
from specdec_cli.drafters.growth import Growth
from specdec_cli.drafters.rounds import check_guess, draw_of, take_chains

if TYPE_CHECKING:
    from specdec_cli.lm.heads.chain_sequences import ChainSequences


class ChainDrafter(HeadDrafter["ChainSequences"]):
    """Guesses chains in one CUDA graph where the head is recorded, and everything else round by round.

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
        """Guess chains in one graph, where the head's scores alone decide."""
        from specdec_cli.lm.heads.head_graphs import HeadChainRow

        if not self.held.is_recorded:
            return
        chains = [draft for draft in drafts if draft.is_plain and self._can_begin(draft.row)]
        counts = [draft.most_depth(longest) for draft in chains]
        rows = [
            HeadChainRow(one.row.handle, one.row.context, one.row.features, num, draw_of(one.row, num))
            for one, num in zip(chains, counts, strict=True)
        ]
        found = self.held.guess(rows, self._num_tokens) if rows else None
        if found is not None:
            take_chains(chains, found)

    def _can_begin(self, row: DraftRow) -> bool:
        """Whether there is, or comes with the row, what a first guess follows from."""
        return self.held.can_draft(row.handle) or (row.features is not None and len(row.features) > 0)
