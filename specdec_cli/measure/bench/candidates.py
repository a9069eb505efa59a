"""The few shapes of drafts that a sweep measures, chosen by prediction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec_cli.measure.predict.draft_shape import DraftShape
from specdec_cli.measure.predict.evidence import TRUSTED
from specdec_cli.measure.predict.predict import Predicted
from specdec_cli.measure.stats import paired

MAX_CANDIDATES = 2


def candidates(rows: Sequence[Predicted]) -> list[DraftShape]:
    """The few shapes to measure, the best predicted one first: intervals overlap its own, and none is clearly slower.

    Prompt by prompt the draws of two shapes go together, so a pair of them can differ where their intervals overlap.
    Where there are chains and trees, the best of each is among them.
    """
    known = [row for row in rows if np.isfinite(row.speedup.median)]
    if not known:
        return []
    ordered = sorted(known, key=lambda row: (-row.speedup.median, row.shape))
    best = ordered[0]
    near = [row for row in ordered if row.speedup.overlaps(best.speedup) and not _is_clearly_slower(row, best)]
    found = [row.shape for row in near[:MAX_CANDIDATES]]
    chain, tree = (
        next((row.shape for row in ordered if (row.shape.tree is None) is is_chain), None) for is_chain in (True, False)
    )
    return list(dict.fromkeys([*found, *(one for one in (chain, tree) if one is not None)]))


def _is_clearly_slower(row: Predicted, best: Predicted) -> bool:
    return paired(best.speedup_by_prompt, row.speedup_by_prompt).ratio.is_above(TRUSTED)
