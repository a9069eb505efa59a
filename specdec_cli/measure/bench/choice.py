"""Which draft a comparison recommends, and why: one of them, none, or that it is not known yet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from specdec_cli.document import Interval
from specdec_cli.measure.bench.compare import Contender, DraftComparison
from specdec_cli.measure.bench.passes import against
from specdec_cli.measure.machine.load import Conditions
from specdec_cli.measure.predict.evidence import INDIFFERENT, Evidence, needs, times
from specdec_cli.recipe.gate import Verdict

NO_WINNER = "none"
_MORE = "more prompts (--num-prompts) or repeats (--repeats)"


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The result of a comparison.

    Args:
        verdict: whether some draft pays.
        winner: the fastest draft; None where none pays, and where it is not surely the fastest.
        fastest: the draft of the largest speed-up, be it sure or not; None where nothing was measured.
        needs: what would settle what is open.
        recommendation: in words.
    """

    verdict: Verdict
    winner: Contender | None
    fastest: Contender | None
    needs: tuple[str, ...]
    recommendation: str

    @property
    def winner_name(self) -> str | None:
        """The winner, `none` where no draft pays, None where that is not known."""
        if self.winner is not None:
            return self.winner.draft
        return NO_WINNER if self.verdict == "do-not-speculate" else None


def choose_draft(comparison: DraftComparison) -> DraftChoice:
    """The recommendation of a comparison."""
    evidence_of = {
        contender: evidence
        for contender in _drafts(comparison)
        if (evidence := _evidence(comparison, contender)) is not None
    }
    if not evidence_of:
        message = "Nothing was measured: no prompt decoded a second token with a draft and without."
        return DraftChoice("inconclusive", None, None, ("prompts whose outputs are longer than one token",), message)
    busy = Conditions.of_passes(comparison.load, comparison.bench.passes).busy
    paying = [contender for contender, evidence in evidence_of.items() if evidence.pays]
    if busy is None and paying:
        return _speculate(comparison, paying[0], [contender for contender in evidence_of if contender is not paying[0]])
    fastest = next(iter(evidence_of))
    message = f"{_name(comparison, fastest)}, is {_times(comparison, fastest)}"
    if busy is None and all(evidence.pays is False for evidence in evidence_of.values()):
        message = f"Do not speculate: no draft is certainly faster; the best, {message}."
        return DraftChoice("do-not-speculate", None, fastest, (), message)
    return _open(comparison, evidence_of, busy, message)


def task_winner(comparison: DraftComparison, task: str) -> tuple[str | None, Interval | None]:
    """The winner of one task's prompts: a name, `none`, or None where that is not known; and the fastest's interval.

    A task has few prompts, and with five even their range covers less than 95 %.
    """
    speedups = [(contender, comparison.speedup(contender, task=task)) for contender in _drafts(comparison)]
    known = sorted(((contender, it) for contender, it in speedups if it is not None), key=lambda pair: -pair[1].median)
    if not known:
        return None, None
    sure = [(contender, speedup) for contender, speedup in known if Evidence(speedup).pays]
    is_busy = Conditions.of_passes(comparison.load, comparison.bench.passes).busy is not None
    if is_busy or not sure:
        is_slow = not is_busy and all(Evidence(speedup).pays is False for _, speedup in known)
        return (NO_WINNER if is_slow else None), known[0][1]
    winner, speedup = sure[0]
    is_first = all(
        _is_no_slower(comparison, winner, contender, task) for contender, _ in known if contender is not winner
    )
    return (winner.draft if is_first else None), speedup


def _drafts(comparison: DraftComparison) -> list[Contender]:
    """Contenders that draft, the fastest first."""
    return [contender for contender in comparison.ranking() if contender.drafts]


def _evidence(comparison: DraftComparison, contender: Contender) -> Evidence | None:
    """The evidence for a draft at its best k. Its costs were measured beforehand, so a prediction only has to agree."""
    measured, k = comparison.speedup(contender), comparison.best_k(contender)
    rows = [] if contender.prediction is None else [row for row in contender.prediction.rows if row.k == k]
    return None if measured is None else Evidence(measured, rows[0].speedup if rows else None, math.inf)


def _is_no_slower(comparison: DraftComparison, contender: Contender, other: Contender, task: str | None = None) -> bool:
    pair = against(comparison.track(contender), comparison.track(other), task=task)
    return pair is not None and pair.ratio.is_above(1 - INDIFFERENT)


def _speculate(comparison: DraftComparison, best: Contender, rest: list[Contender]) -> DraftChoice:
    """Some draft pays; which one is open where another may be faster."""
    rivals = [contender for contender in rest if not _is_no_slower(comparison, best, contender)]
    message = f"{_times(comparison, best)}{_runner_up(comparison, best, rivals or rest)}"
    if not rivals:
        k = comparison.best_k(best)
        return DraftChoice("speculate", best, best, (), f"Use {best.draft} with k = {k}: it is {message}.")
    message = f"Speculate; the best draft is undecided: {_name(comparison, best)} is {message}. To settle it: {_MORE}."
    return DraftChoice("speculate", None, best, (_MORE,), message)


def _open(
    comparison: DraftComparison, evidence_of: Mapping[Contender, Evidence], busy: str | None, message: str
) -> DraftChoice:
    """Nothing pays for sure, and something may."""
    fastest = next(iter(evidence_of))
    asked = next((evidence for evidence in evidence_of.values() if evidence.pays is None), evidence_of[fastest])
    wanted = needs(asked, busy, comparison.batch_size)
    if asked.is_contradictory:
        why = "prediction and measurement exclude each other"
    elif busy is not None:
        why = "the machine was busy"
    elif asked.is_of_few:
        why = "too few pairs to be certain"
    else:
        why = "the interval contains both answers"
    text = f"Inconclusive: {why}. The fastest, {message}. To settle it: {'; '.join(wanted)}."
    return DraftChoice("inconclusive", None, fastest, wanted, text)


def _runner_up(comparison: DraftComparison, winner: Contender, rest: list[Contender]) -> str:
    pair = against(comparison.track(winner), comparison.track(rest[0])) if rest else None
    if pair is None:
        return ""
    name = _name(comparison, rest[0])
    chance = "too few pairs" if pair.p_a_faster is None else f"P {pair.p_a_faster:.2f}"
    if pair.is_significant:
        return f", and {times(pair.ratio)} as fast as {name}, the next ({chance})"
    mine, other = winner.sizes()[1], rest[0].sizes()[1]
    smaller = " and takes less memory" if mine is not None and other is not None and other < mine else ""
    return f"; {name} is not certainly slower{smaller} (ratio {times(pair.ratio)}, {chance})"


def _name(comparison: DraftComparison, contender: Contender) -> str:
    return f"{contender.draft} (k = {comparison.best_k(contender)})"


def _times(comparison: DraftComparison, contender: Contender) -> str:
    speedup = comparison.speedup(contender)
    assert speedup is not None, "only what was measured is quoted"
    return f"{times(speedup)} as fast as plain decoding"
