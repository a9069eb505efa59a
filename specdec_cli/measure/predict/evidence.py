"""Whether a draft pays: what measurement and prediction say together, and what would settle it where that is open.

A firm answer takes evidence that lies on one side: the whole measured interval, of pairs enough or with a prediction
that says the same, and no prediction that excludes it. Everything else is inconclusive, a single pair always.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import PlainSerializer

from specdec_cli.document import Count, Interval
from specdec_cli.draft_shape import DraftShape
from specdec_cli.drafted import MOST_DEPTH
from specdec_cli.measure.stats import ENOUGH_PAIRS
from specdec_cli.recipe.gate import Verdict
from specdec_cli.tree_shape import TreeShape

INDIFFERENT = 0.02
"""Speeds within two per cent are as good as each other: a draft that gains less does not pay."""
TRUSTED = 1.1
"""A profile of a shared machine is trusted to ten per cent."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Which k or tree to run with, and how sure that is.

    Args:
        k: 0 is no draft; of a tree its depth; if the verdict is inconclusive, the k in use.
        tree: to draft; None for a chain of k tokens.
        speedup: of that k; where the verdict is inconclusive all that the evidence on the best k leaves open; None
            without a draft, and where nothing is known.
        why: in words.
        verdict: the answer.
        needs: what would settle it; empty where it is settled.
        p_min: with which the draft ends before a token that it is less sure of; None where it always drafts k tokens.
    """

    k: Count
    tree: Annotated[TreeShape | None, PlainSerializer(lambda tree: tree and str(tree), str | None)]
    speedup: Interval | None
    why: str
    verdict: Verdict
    needs: tuple[str, ...] = ()
    p_min: float | None = None

    @classmethod
    def of(
        cls, shape: DraftShape, speedup: Interval | None, why: str, verdict: Verdict, needs: tuple[str, ...] = ()
    ) -> Recommendation:
        """Recommendation of a shape."""
        return cls(shape.k, shape.tree, speedup, why, verdict, needs, shape.p_min or None)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence for one speed-up.

    Args:
        measured: over plain decoding; None where it was not.
        predicted: from a trace and a cost profile; None where it was not.
        trusted: factor that two intervals of the same answer may lie apart before they exclude each other.
    """

    measured: Interval | None
    predicted: Interval | None = None
    trusted: float = TRUSTED

    @property
    def pays(self) -> bool | None:
        """Whether the draft is faster; None where that is open."""
        measured, expected = self.measured, side(self.predicted)
        if self.is_contradictory:
            return None
        if measured is None:
            return expected
        answer = side(measured)
        return answer if measured.pairs >= ENOUGH_PAIRS or answer == expected else None

    @property
    def is_contradictory(self) -> bool:
        """Whether prediction and measurement exclude each other."""
        measured, predicted = self.measured, self.predicted
        if measured is None or predicted is None or predicted.ci95 is None:
            return False
        if measured.ci95 is None:
            return side(predicted) is not None and side(predicted) != (measured.median > 1)
        if measured.overlaps(predicted):
            return False
        (low, high), (least, most), expected = measured.ci95, predicted.ci95, side(predicted)
        is_opposite = expected is not None and expected != side(measured)
        return is_opposite or low / most > self.trusted or least / high > self.trusted

    @property
    def is_of_few(self) -> bool:
        """Whether what was measured rests on fewer pairs than an interval of 95 % takes."""
        return self.measured is not None and self.measured.pairs < ENOUGH_PAIRS

    @property
    def most(self) -> float:
        """The larger of the figures that were measured and predicted."""
        return max(speedup.median for speedup in (self.measured, self.predicted) if speedup is not None)

    @property
    def range(self) -> Interval | None:
        """All that prediction and measurement leave open."""
        both = [speedup for speedup in (self.measured, self.predicted) if speedup is not None]
        known = [speedup for speedup in both if np.isfinite(speedup.median)]
        if not known:
            return None
        ends = [end for speedup in known for end in (speedup.ci95 or (speedup.median, speedup.median))]
        has_interval = any(speedup.ci95 is not None for speedup in known)
        return Interval(known[0].median, (min(ends), max(ends)) if has_interval else None, known[0].pairs)


def side(speedup: Interval | None) -> bool | None:
    """Whether a whole interval says that a draft pays; None where it holds both answers, and without one."""
    if speedup is None or speedup.ci95 is None or not np.isfinite(speedup.ci95).all():
        return None
    if speedup.is_above(1.0):
        return True
    return False if speedup.ci95[1] <= 1 + INDIFFERENT else None


def needs(evidence: Evidence, busy: str | None, batch_size: int = 1) -> tuple[str, ...]:
    """The measures that would settle an open question.

    Args:
        evidence: on the best of what was compared.
        busy: that the machine was busy, in words, or None.
        batch_size: prompts that make a pair.
    """
    measures = ["a quiet machine"] if busy or evidence.is_contradictory else []
    if evidence.is_contradictory:
        measures.append("more repeats (--repeats), until prediction and measurement agree")
    if evidence.is_of_few:
        measures.append(f"{ENOUGH_PAIRS * batch_size} prompts or more (--num-prompts)")
    elif not evidence.is_contradictory and evidence.pays is None:
        measures.append("more prompts (--num-prompts) or repeats (--repeats)")
    return tuple(measures)


def times(speedup: Interval) -> str:
    """`1.42× (1.31 to 1.55)`."""
    ends = "" if speedup.ci95 is None else f" ({speedup.ci95[0]:.2f} to {speedup.ci95[1]:.2f})"
    return f"{speedup.median:.2f}×{ends}"


def largest_words(k_max: int, most_depth: int | None = None) -> str:
    """End of a sentence: the best k is the largest one considered, and how to consider more.

    Args:
        k_max: the largest k.
        most_depth: the largest k that the draft can reach; None without a limit.
    """
    if k_max >= (MOST_DEPTH if most_depth is None else most_depth):
        return "it is the largest k possible here"
    return f"it is the largest k considered: `--k-max {min(2 * k_max, MOST_DEPTH)}` looks further"
