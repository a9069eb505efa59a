"""The recommendation of a sweep at one batch size, with its reason: a k, a tree, no draft, or inconclusive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.document import Interval
from specdec_cli.draft_shape import DraftShape, shape_words
from specdec_cli.measure.predict.evidence import Evidence, Recommendation, needs, times
from specdec_cli.measure.predict.predict import PUBLISHED_K

if TYPE_CHECKING:
    from specdec_cli.measure.bench.study import SizeStudy


@dataclass(frozen=True, slots=True)
class Case:
    """Evidence and circumstances that a recommendation rests on.

    Args:
        study: of one batch size.
        by_shape: the evidence on every measured k and tree.
        busy: that the machine was busy, in words, or None.
    """

    study: SizeStudy
    by_shape: Mapping[DraftShape, Evidence]
    busy: str | None

    def recommend(self) -> Recommendation:
        """The k or tree to run with; what was measured decides, where nothing speaks against it."""
        if not self.by_shape:
            return self._by_prediction()
        best = self._best(self.by_shape)
        if self.busy is not None:
            return self._open(best)
        if all(evidence.pays is False for evidence in self.by_shape.values()):
            return Recommendation(0, None, None, self._why_not(best), "do-not-speculate")
        all_paying = [shape for shape, evidence in self.by_shape.items() if evidence.pays]
        paying = self._best(all_paying) if all_paying else None
        in_the_way = self._open_beside(paying)
        if paying is None or in_the_way:
            return self._open(self._best(in_the_way))
        return Recommendation.of(paying, self._measured(paying), self._why(paying), "speculate")

    def _open_beside(self, paying: DraftShape | None) -> list[DraftShape]:
        """The open shapes, of which beside one that pays only contradictory ones matter that may be faster."""
        still_open = {shape: evidence for shape, evidence in self.by_shape.items() if evidence.pays is None}
        if paying is None:
            return list(still_open)
        least = self._measured(paying).median
        return [shape for shape, it in still_open.items() if it.is_contradictory and it.most > least]

    def _best(self, shapes: Iterable[DraftShape]) -> DraftShape:
        """The one that was measured fastest, the smaller of equals."""
        return max(sorted(shapes), key=lambda shape: self._measured(shape).median)

    def _measured(self, shape: DraftShape) -> Interval:
        measured = self.by_shape[shape].measured
        assert measured is not None, "a case holds what was measured"
        return measured

    def _by_prediction(self) -> Recommendation:
        """Nothing was measured: the prediction alone settles nothing, for steps were not timed in decoding."""
        assert self.study.prediction is not None, "without a prediction something was measured"
        predicted = self.study.prediction.recommended
        if predicted.needs:
            in_use, why = self.study.in_use, predicted.why
            return Recommendation.of(in_use, predicted.speedup, why, "inconclusive", predicted.needs)
        why, wanted = f"nothing was measured; predicted: {predicted.why}", ("a run to its end, which measures",)
        return Recommendation.of(self.study.in_use, predicted.speedup, why, "inconclusive", wanted)

    def _open(self, shape: DraftShape) -> Recommendation:
        evidence, why = self.by_shape[shape], self._why_open(shape)
        wanted = needs(evidence, self.busy, self.study.batch_size)
        return Recommendation.of(self.study.in_use, evidence.range, why, "inconclusive", wanted)

    def _why_open(self, shape: DraftShape) -> str:
        evidence, measured = self.by_shape[shape], self._measured(shape)
        pairs = "a single pair" if measured.pairs == 1 else f"{measured.pairs} pairs"
        predicted = "" if evidence.predicted is None else f"predicted {times(evidence.predicted)} and "
        figures = f"{shape} was {predicted}measured {times(measured)} as fast as no draft, from {pairs}"
        also = f"; {self.busy}" if self.busy else ""
        if evidence.is_contradictory:
            return f"prediction and measurement exclude each other: {figures}{also}"
        if evidence.pays is not None:
            return f"{self.busy}; {figures}"
        if evidence.is_of_few:
            return f"too few pairs to be certain: {figures}{also}"
        return f"the interval contains both answers: {figures}{also}"

    def _why(self, best: DraftShape) -> str:
        num = len(self.by_shape)
        which = "the only k measured" if num == 1 else f"the largest of the {num} measured"
        measured = self._measured(best)
        near = [shape for shape in sorted(self.by_shape) if shape != best and self._measured(shape).overlaps(measured)]
        also = f"; its interval overlaps that of {shape_words(near)}" if near else ""
        figures = f"{best} decodes {times(measured)} as fast{self._beside(best)}"
        known = "" if best.tree is not None else f"; {guidance(best.k)}"
        return f"{figures}, {which}{also}{self._other_kind(best)}{known}"

    def _other_kind(self, best: DraftShape) -> str:
        """How fast the best tree is beside a chain, or the best chain beside a tree."""
        others = [shape for shape in self.by_shape if (shape.tree is None) != (best.tree is None)]
        if not others:
            return ""
        other = self._best(others)
        kind, name = ("chain", str(other)) if other.tree is None else ("tree", str(other.tree))
        figures = f"({name}) decodes {times(self._measured(other))} as fast"
        return (
            f"; no {kind} pays: the best {figures}"
            if self.by_shape[other].pays is False
            else f"; the best {kind} {figures}"
        )

    def _why_not(self, best: DraftShape) -> str:
        measured, costs = self._measured(best), self.study.step_split(best)
        sure = ", which is no gain" if measured.median > 1 else ""
        reason = ""
        if costs is not None:
            reason = (
                f": a step gives {costs.tokens_per_step:.2f} tokens and costs "
                f"{costs.breakeven_tokens_per_step:.2f} plain steps, "
                f"{costs.draft_seconds_per_step / costs.step_seconds:.0%} of it drafting and "
                f"{costs.verify_seconds_per_step / costs.step_seconds:.0%} verification"
            )
        return (
            f"do not speculate: even the best {best} decodes {times(measured)} as fast"
            f"{sure}{self._beside(best)}{reason}"
        )

    def _beside(self, shape: DraftShape) -> str:
        predicted = self.by_shape[shape].predicted
        return "" if predicted is None else f" (predicted {predicted.median:.2f}×)"


def guidance(k: int) -> str:
    """Whether a k is within the published guidance, in words."""
    low, high = PUBLISHED_K
    place = "within" if low <= k <= high else "outside"
    return f"{place} the published guidance of {low} to {high}"
