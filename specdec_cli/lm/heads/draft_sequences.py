"""A loaded draft on the target's hidden states: the contract between a format's file and the drafter that asks it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdec_cli.drafted import Drafted

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specdec_cli.lm.cache.budget import DraftCache
    from specdec_cli.lm.door import Continuations
    from specdec_cli.lm.heads.head_graphs import HeadDraftRow
    from specdec_cli.tree_shape import TreeShape


@dataclass(slots=True)
class HeadRow:
    """One sequence whose drafted nodes want logits.

    Args:
        handle: names the sequence, which was fed before.
        drafted: its nodes so far.
        ends: the nodes after which logits are wanted; -1 is the context's end.
        is_pruned: nodes may have left the tree since the last call.
    """

    handle: int
    drafted: Drafted
    ends: Sequence[int]
    is_pruned: bool = False


@dataclass(frozen=True, slots=True)
class Ahead:
    """Logits of sequences' next tokens, all from one pass.

    Of n rows, `behind` and `confidence` read for each the states [depth, hidden] of its sequence up to the row's own,
    and as many tokens: that of the context's end and those drafted before the row's token.

    Args:
        logits: of each sequence [depth, V] float32; where `behind` is there, of the drafted vocabulary alone.
        states: of each sequence [depth, hidden], which `behind` and `confidence` read; empty without these.
        behind: logits [n, V] of rows of `logits` [n, drafted vocabulary] behind the tokens before them; None where no
            token before changes them.
        confidence: P [n] that the token of such a row is accepted, whatever it is; None without a head for it.
    """

    logits: list[Tensor]
    states: list[Tensor] = field(default_factory=list)
    behind: Callable[[Tensor, Sequence[Tensor], Sequence[Sequence[int]]], Tensor] | None = None
    confidence: Callable[[Sequence[Tensor], Sequence[Sequence[int]]], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class RecordedAhead:
    """The same in a CUDA graph, of B sequences.

    Args:
        logits: [B, depth, V] float32; where `behind` is there, of the drafted vocabulary alone.
        behind: logits [B, V] of a depth, counted from 0, behind tokens [B, depth + 1]: that of the context's end, and
            those drafted before; None where no token before changes them.
    """

    logits: Tensor
    behind: Callable[[int, Tensor], Tensor] | None = None


class DraftSequences(ABC):
    """State that a loaded draft keeps of each sequence, and its logits of the next tokens.

    A draft that goes token by token has `logits`; one whose row in `draft_formats` says `one_pass` has `ahead`. Most
    are `HeadSequences`, which keep keys and values; a draft that keeps something else inherits from here.

    Attributes:
        device: where it runs, of one that is recorded.
        graphs_obstacle: why it records no graphs beside a target that does; None where it does, or where the target has
            none.
    """

    graphs_obstacle: str | None = None
    device: torch.device

    @property
    def planned_cache(self) -> DraftCache | None:
        """Its keys and values, whose blocks are planned beside the target's; None for a draft without."""
        return None

    @property
    def is_recorded(self) -> bool:
        """Whether `guess` drafts in CUDA graphs."""
        return False

    @property
    def records_trees(self) -> bool:
        """Whether `guess` drafts trees, too."""
        return self.is_recorded

    @property
    def most_tokens(self) -> int | None:
        """Tokens that it drafts in a row at most; None drafts as many as are wanted."""
        return None

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Parameters of the draft, and bytes of these and of what it keeps of sequences now."""

    @abstractmethod
    def feed(self, new: Sequence[tuple[int, Sequence[int], Tensor]], depths: Sequence[int]) -> None:
        """Take the target's states of positions that were kept; what was drafted in their place is forgotten.

        Args:
            new: of each sequence its handle, its context, and the states [n, taps, target hidden] of the last n
                positions that a token follows; the same again if a row is requested a second time in a step.
            depths: for each, how many tokens are wanted behind it.

        Raises:
            RunError: too few blocks are free.
        """

    @abstractmethod
    def can_draft(self, handle: int) -> bool:
        """Whether it was fed what a first guess follows from."""

    @abstractmethod
    def release(self, handle: int) -> None:
        """Forget a sequence; unknown ones are fine."""

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Begin a sequence with a prefix that the target has cached: positions whose states it can do without."""
        return 0

    def logits(self, rows: Sequence[HeadRow]) -> Tensor:
        """Logits [sum of ends, V] float32 after every end, row after row.

        Raises:
            RunError: too few blocks are free.
        """
        raise NotImplementedError

    def ahead(self, ends: Sequence[tuple[int, int, int]]) -> Ahead:
        """Logits of all next tokens, from one pass.

        Args:
            ends: of each sequence its handle, its last token, and how many tokens are wanted, at most `most_tokens`.

        Raises:
            RunError: too few blocks are free.
        """
        raise NotImplementedError

    def guess(self, rows: Sequence[HeadDraftRow], num_tokens: int, tree: TreeShape | None = None) -> Continuations:
        """Take the target's states of some sequences and draft a chain or a tree behind each, in one graph.

        Args:
            rows: the sequences; of each there are new states, or the output that a first guess follows from.
            num_tokens: V, the real vocabulary; no token is beyond it.
            tree: the static shape of all of them, which draw nothing; None wants chains.

        Raises:
            RunError: too few blocks are free, or the head cannot be recorded.
        """
        raise NotImplementedError
