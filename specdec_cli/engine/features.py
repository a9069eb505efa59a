"""Hidden states of the target on their way to a drafter: those of every kept position, each once, in order.

A forward feeds chunks of a prompt, a step's last token and drafted nodes, and after a failure or a preemption some of
them again. The book keeps what stands and drops what the verdict refused, until the drafter takes it. Tensors are cut
and joined only then: where nothing is drafted for long, a step costs what it costs without features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_cli.lm.door import Tapped
from specdec_cli.lm.hidden_states import HiddenStates


@dataclass(slots=True)
class _PendingStates:
    """The states of one sequence that its drafter has not taken.

    Args:
        end: the position behind the last kept one; the drafter has those before the first, or needs none.
        kept: states of neighbouring positions.
        nodes: states of the tokens that were drafted behind these, before the verdict.
    """

    end: int
    kept: list[HiddenStates] = field(default_factory=list)
    nodes: HiddenStates | None = None

    def keep(self, states: HiddenStates) -> None:
        """Add the states of the positions behind."""
        self.end += len(states)
        joined = self.kept[-1].joined(states) if self.kept else None
        if joined is None:
            self.kept.append(states)
        else:
            self.kept[-1] = joined

    def cut(self, end: int) -> None:
        """Drop what is kept of positions from `end` on."""
        while self.kept and self.end > end:
            last = self.kept.pop()
            self.end -= len(last)
            if self.end < end:
                self.keep(last.part(0, end - self.end))

    def take(self) -> list[Tensor]:
        """Give away what is kept, [positions, taps, hidden] each."""
        taken, self.kept = self.kept, []
        return [states.tensor() for states in taken]


class FeatureBook:
    """The states of all sequences that wait for their drafters."""

    def __init__(self) -> None:
        self._pending: dict[int, _PendingStates] = {}

    def begin(self, sequence_id: int, position: int) -> None:
        """Start a sequence: the drafter knows, or needs not know, the states before a position."""
        self._pending[sequence_id] = _PendingStates(position)

    def known(self, sequence_id: int) -> int:
        """First so many positions whose states the drafter or the book has."""
        return self._pending.setdefault(sequence_id, _PendingStates(0)).end

    def add(self, sequence_id: int, tapped: Tapped, num_context: int) -> None:
        """Take what a forward fed: context tokens, and behind them drafted nodes.

        Args:
            sequence_id: of the row.
            tapped: the row's, as the target filled it in.
            num_context: tokens of the row's context, drafted ones not counted.
        """
        hidden = tapped.hidden
        if hidden is None:
            return
        pending = self._pending.setdefault(sequence_id, _PendingStates(0))
        pending.cut(tapped.first)
        assert tapped.first <= pending.end, "the target skipped positions that the drafter has no states of"
        num = num_context - tapped.first
        if pending.end < num_context:
            pending.keep(hidden.part(pending.end - tapped.first, num))
        pending.nodes = hidden.part(num, len(hidden)) if num < len(hidden) else None

    def accept(self, sequence_id: int, path: Sequence[int]) -> None:
        """Keep the nodes on the accepted path."""
        pending = self._pending.get(sequence_id)
        if pending is not None and pending.nodes is not None:
            if path:
                pending.keep(pending.nodes.chosen(path))
            pending.nodes = None

    def take(self, sequence_id: int, num_tokens: int, columns: Sequence[int]) -> Tensor | None:
        """States [positions, columns, hidden] since the last call, up to the last token but one of so many.

        Of the last token there are none: the target reads it in the step to come. None where there are none at all.
        """
        pending = self._pending.get(sequence_id)
        if pending is None:
            return None
        pending.cut(num_tokens - 1)
        kept = pending.take()
        if not kept:
            return None
        states = kept[0] if len(kept) == 1 else torch.cat(kept)
        if list(columns) == list(range(states.shape[1])):
            return states
        return torch.stack([states[:, column] for column in columns], 1)  # a GPU would be waited for to index it

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence; unknown ones are fine."""
        self._pending.pop(sequence_id, None)
