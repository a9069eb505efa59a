"""Two drafts for one request, `A+B`: B guesses where A has nothing, as in Arctic Inference (Oliaro et al. 2024).

A costs next to nothing and guesses without chance, such as `suffix`; B is anything. Which of them guesses follows from
the context, before anything is drawn, so that each guess is judged as its draft's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import Drafter, DraftRow, Guesses, Resources, WithoutFeatures

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.lm.door import Tap
    from specdec_cli.lm.self_draft import SelfDraft
    from specdec_cli.text.shared_vocabulary import SharedVocabulary


class DraftWithFallback(WithoutFeatures):
    """The guesses of a first draft, or where it has none those of a second one."""

    lm = None

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first = first
        self.second = second
        self.one_pass = second.one_pass
        self._features: dict[int, list[Tensor]] = {}  # that the second draft has not read yet

    @property
    def shared_vocabulary(self) -> SharedVocabulary | None:
        """The second draft's."""
        return self.second.shared_vocabulary

    @property
    def max_context(self) -> int | None:
        """The longer of both limits; past its own a draft is not asked."""
        return _longer(self.first.max_context, self.second.max_context)

    @property
    def most_depth(self) -> int | None:
        """The deeper of both limits: where only one draft has a limit, the other goes deeper."""
        return _longer(self.first.most_depth, self.second.most_depth)

    @property
    def builds_trees(self) -> bool:
        """Whether one of them does; where a tree is wanted, the other guesses a chain."""
        return self.first.builds_trees or self.second.builds_trees

    @property
    def draws(self) -> bool:
        """Whether one of them does."""
        return self.first.draws or self.second.draws

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Of both together."""
        (num, num_bytes), (other_num, other_bytes) = self.first.sizes, self.second.sizes
        return _sum(num, other_num), _sum(num_bytes, other_bytes)

    @property
    def graphs_obstacle(self) -> str | None:
        """The second draft's: a first one has no head."""
        return self.second.graphs_obstacle

    @property
    def taps(self) -> Sequence[Tap]:
        """The second draft's: a first one reads no hidden states."""
        return self.second.taps

    @property
    def self_drafts(self) -> Sequence[SelfDraft]:
        """Those of both."""
        return (*self.first.self_drafts, *self.second.self_drafts)

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Ask the second draft, which alone reads features."""
        return self.second.adopt(handle, context, salt)

    def load(self, resources: Resources) -> None:
        """Load both."""
        for drafter in (self.first, self.second):
            drafter.load(resources)

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """The first draft's guesses; for rows in which it has none, the second one's."""
        guesses = _ask(self.first, rows, range(len(rows)))
        for row in rows:
            self._keep_features(row)
        rest = [place for place, guess in enumerate(guesses) if not guess.drafted]
        asked = [self._with_features(rows[place]) for place in rest]
        for place, guess in zip(rest, _ask(self.second, asked, rest), strict=True):
            guesses[place] = guess
        return guesses

    def _keep_features(self, row: DraftRow) -> None:
        """Keep a row's features for the second draft; a row that comes again in the same step brings them again."""
        if row.features is not None:
            kept = self._features.setdefault(row.handle, [])
            if not kept or kept[-1] is not row.features:
                kept.append(row.features)

    def _with_features(self, row: DraftRow) -> DraftRow:
        """A row with all features that the second draft has not read, those of steps without it included."""
        kept = self._features.pop(row.handle, [])
        if not kept or (len(kept) == 1 and kept[0] is row.features):
            return row
        import torch

        return replace(row, features=kept[0] if len(kept) == 1 else torch.cat(kept))

    def release(self, handle: int) -> None:
        """Forget a sequence, in both."""
        self._features.pop(handle, None)
        self.first.release(handle)
        self.second.release(handle)

    def clear(self) -> None:
        """Forget what they keep of sequences that ended."""
        self.first.clear()
        self.second.clear()


def _ask(drafter: Drafter, rows: Sequence[DraftRow], places: Sequence[int]) -> list[Guesses]:
    """A draft's guesses for rows within its context; nothing for others.

    Raises:
        LogitsError: a row has no distribution, named by its place.
    """
    from specdec_cli.sampling.chain import LogitsError

    row_guesses = [Guesses() for _ in rows]
    fitting = [(i, fitted) for i, row in enumerate(rows) if (fitted := _fit(drafter, row)).k > 0]
    try:
        guesses = drafter.propose([row for _, row in fitting]) if fitting else []
    except LogitsError as error:
        raise LogitsError(error.message, places[fitting[error.row][0]], error.hint) from error
    for (i, _), guess in zip(fitting, guesses, strict=True):
        row_guesses[i] = guess
    return row_guesses


def _fit(drafter: Drafter, row: DraftRow) -> DraftRow:
    """A row as deep as a draft reads, and without a tree for one that builds none."""
    limit, k, tree = drafter.max_context, row.k, row.tree
    if limit is not None:
        k = max(0, min(k, limit + 1 - len(row.context)))
    if tree is not None and not drafter.builds_trees:
        k, tree = min(k, row.most_nodes), None
    return row if k == row.k and tree is row.tree else replace(row, k=k, tree=tree)


def _longer(a: int | None, b: int | None) -> int | None:
    """The larger of two limits, of which None is no limit."""
    return None if a is None or b is None else max(a, b)


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b
