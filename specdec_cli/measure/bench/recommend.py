"""The recommendation of a sweep at one batch size, with its reason: a k, no draft, or inconclusive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from specdec_cli.measure.bench.verdict import StepSplit
from specdec_cli.measure.predict.evidence import Evidence, Recommendation, needs, times
from specdec_cli.measure.predict.predict import PUBLISHED_K, Prediction
from specdec_cli.measure.stats import Interval


@dataclass(frozen=True, slots=True)
class Case:
    """All that a sweep knows when it recommends.

    Args:
        by_k: the evidence on every measured k.
        prediction: of every k; None where no trace can tell.
        busy: that the machine was busy, in words, or None.
        k_in_use: the recipe's own, which stays where the case is open.
        batch_size: prompts that decode together.
        costs: where the time of a measured k's steps goes; None where that is not known.
    """

    by_k: Mapping[int, Evidence]
    prediction: Prediction | None
    busy: str | None
    k_in_use: int
    batch_size: int
    costs: Callable[[int], StepSplit | None]

    def recommend(self) -> Recommendation:
        """The k to run with; what was measured decides, where nothing speaks against it."""
        if not self.by_k:
            return self._by_prediction()
        best = max(self.by_k, key=self._rank)
        if self.busy is not None:
            return self._open(best)
        if all(one.pays is False for one in self.by_k.values()):
            return Recommendation(0, None, self._why_not(best), "do-not-speculate")
        paying = max((k for k, one in self.by_k.items() if one.pays), key=self._rank, default=None)
        in_the_way = self._open_beside(paying)
        if paying is None or in_the_way:
            return self._open(max(in_the_way, key=self._rank))
        return Recommendation(paying, self._measured(paying), self._why(paying), "speculate")

    def _open_beside(self, paying: int | None) -> list[int]:
        """The open k, of which beside one that pays only contradictory ones matter, and those that may be faster."""
        found = {k: one for k, one in self.by_k.items() if one.pays is None}
        if paying is None:
            return list(found)
        least = self._measured(paying).median
        return [k for k, one in found.items() if one.is_contradictory and one.most > least]

    def _rank(self, k: int) -> tuple[float, int]:
        measured = self._measured(k)
        return measured.median, -k

    def _measured(self, k: int) -> Interval:
        measured = self.by_k[k].measured
        assert measured is not None, "a case holds what was measured"
        return measured

    def _by_prediction(self) -> Recommendation:
        """Nothing was measured: the prediction alone settles nothing, for steps were not timed in decoding."""
        assert self.prediction is not None, "without a prediction something was measured"
        found = self.prediction.recommended
        if found.needs:
            return replace(found, k=self.k_in_use, verdict="inconclusive")
        why, wanted = f"nothing was measured; predicted: {found.why}", ("a run to its end, which measures",)
        return Recommendation(self.k_in_use, found.speedup, why, "inconclusive", wanted)

    def _open(self, k: int) -> Recommendation:
        evidence = self.by_k[k]
        wanted = needs(evidence, self.busy, self.batch_size)
        return Recommendation(self.k_in_use, evidence.range, self._why_open(k), "inconclusive", wanted)

    def _why_open(self, k: int) -> str:
        evidence, measured = self.by_k[k], self._measured(k)
        pairs = "a single pair" if measured.pairs == 1 else f"{measured.pairs} pairs"
        predicted = "" if evidence.predicted is None else f"predicted {times(evidence.predicted)} and "
        found = f"k = {k} was {predicted}measured {times(measured)} as fast as no draft, from {pairs}"
        also = f"; {self.busy}" if self.busy else ""
        if evidence.is_contradictory:
            return f"prediction and measurement exclude each other: {found}{also}"
        if evidence.pays is not None:
            return f"{self.busy}; {found}"
        if evidence.is_of_few:
            return f"too few pairs to be certain: {found}{also}"
        return f"the interval contains both answers: {found}{also}"

    def _why(self, best: int) -> str:
        which = "the only k measured" if len(self.by_k) == 1 else f"the largest of the {len(self.by_k)} measured"
        measured = self._measured(best)
        near = [str(k) for k in sorted(self.by_k) if k != best and self._measured(k).overlaps(measured)]
        also = f"; its interval overlaps that of k = {', '.join(near)}" if near else ""
        found = f"k = {best} decodes {times(measured)} as fast{self._beside(best)}"
        return f"{found}, {which}{also}; {guidance(best)}"

    def _why_not(self, best: int) -> str:
        measured, costs = self._measured(best), self.costs(best)
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
            f"do not speculate: even the best k = {best} decodes {times(measured)} as fast"
            f"{sure}{self._beside(best)}{reason}"
        )

    def _beside(self, k: int) -> str:
        predicted = self.by_k[k].predicted
        return "" if predicted is None else f" (predicted {predicted.median:.2f}×)"


def guidance(k: int) -> str:
    """Where a k stands to what is published."""
    low, high = PUBLISHED_K
    place = "within" if low <= k <= high else "outside"
    return f"{place} the published guidance of {low} to {high}"
