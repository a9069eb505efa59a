"""Counts of speculation as another tool gives them, their sum over files, and the document `specdec.import/1`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from specdec_cli.document import Result, ResultDocument, SpeculativeResult
from specdec_cli.measure.documents.parts import GateResult
from specdec_cli.measure.endpoint.counters import MetricsPage
from specdec_cli.measure.endpoint.server_counts import (
    ACCEPTED,
    DRAFTED,
    DRAFTS,
    position_key,
    reached_positions,
    statistics,
)
from specdec_cli.quantities import counted

_LENGTH = "1 + accepted drafted tokens for each step that drafted"
_RATE = "accepted drafted tokens over drafted tokens"
_TOTALS = {DRAFTS: "drafting steps", DRAFTED: "drafted tokens", ACCEPTED: "accepted tokens"}
_MOST_KEPT = 1024
_ROUNDED = 0.0011
"""Shares have three decimals in a log: two that are equal may differ by one in the last."""


def amount(value: Any) -> float:
    """Convert a count, length or rate of a file to a number.

    Raises:
        ValueError: it is negative, or no number.
    """
    if isinstance(value, bool):
        raise ValueError("true or false, and no number")
    number = float(value)
    if not isfinite(number) or number < 0:
        raise ValueError("neither zero nor positive")
    return number


class ImportSource(Result):
    """The tool that made the run, the form of its files, and their names."""

    tool: Literal["vllm", "sglang", "llama.cpp", "tensorrt-llm", "specdec", "guidellm", "aiperf"]
    form: str
    files: list[str]


class ImportDocument(ResultDocument):
    """Speculation of a run that another tool made."""

    schema_name: ClassVar[str] = "specdec.import/1"

    source: ImportSource
    speculative: SpeculativeResult | None
    reported: dict[str, float] = Field(description="Figures that the tool reports itself, by its own names.")
    definitions: dict[str, str] = Field(description="The tool's own definitions of its figures.")
    notices: list[str]
    gates: list[GateResult] = Field(default_factory=list)


@dataclass
class ImportedRun:
    """One file's counts.

    Args:
        tool: that counted.
        form: what the file is, for people.
        counts: by vLLM's names of counters; those that the tool does not give are missing.
        outcomes: steps by drafted and accepted tokens, of requests that list each step.
        rates: share of the drafting steps that accepted position 1, 2, ... and all before it, where the tool gives
            rates and no counts; weighted by `weight`.
        weight: drafting steps that the rates are of.
        reported: figures that the tool itself reports, by its own names.
        definitions: what acceptance rate and length mean in this tool, where that differs.
        notices: sentences about what is missing or was derived.
        partial: counts that some requests or results lack. Their sum is no total, so it is left out.
        contradicted: a sentence's end about figures of one line, interval or result that cannot all be right.
        requests: ids of the requests that are counted, where they have some.
        path: of the file, once it is read.
        kind: of the file, by its reader.
        page: the metrics in it, if it is a dump of some.
    """

    tool: str
    form: str
    counts: dict[str, float] = field(default_factory=dict)
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)
    rates: list[float] = field(default_factory=list)
    weight: float = 0.0
    reported: dict[str, float] = field(default_factory=dict)
    definitions: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    partial: set[str] = field(default_factory=set)
    contradicted: str | None = None
    requests: set[str] = field(default_factory=set)
    path: Path = Path()
    kind: str = ""
    page: MetricsPage | None = None

    def add(self, counts: Mapping[str, float | None]) -> None:
        """Add the counts of a request, an interval or a result; None is a count that it lacks.

        Where nothing was counted, what is missing is nothing.
        """
        for name, count in counts.items():
            if count is not None:
                self.counts[name] = self.counts.get(name, 0.0) + count
            elif any(counts.values()):
                self.partial.add(name)

    def add_positions(self, reached: Sequence[float]) -> None:
        """Count steps that accepted at least 1, 2, ... tokens."""
        for place, count in enumerate(reached):
            key = position_key(place)
            self.counts[key] = self.counts.get(key, 0.0) + count

    def add_rates(self, rates: Sequence[float], weight: float) -> None:
        """Average rates by position with those so far, by how many steps each is of."""
        if weight <= 0:
            return
        most = max(len(self.rates), len(rates))
        padded = [[*shares, *[0.0] * (most - len(shares))] for shares in (self.rates, rates)]
        both = self.weight + weight
        self.rates = [(a * self.weight + b * weight) / both for a, b in zip(*padded, strict=True)]
        self.weight = both

    def add_histogram(self, histogram: Mapping[int, float]) -> None:
        """Count steps by how many drafted tokens they accepted.

        Raises:
            ValueError: a step cannot have accepted as many.
        """
        most = max(histogram, default=0)
        if most > _MOST_KEPT or min(histogram, default=0) < 0:
            raise ValueError("no step accepts as many tokens")
        self.add_positions([sum(n for kept, n in histogram.items() if kept >= i) for i in range(1, most + 1)])

    def contradiction(self) -> str | None:
        """End of a sentence about counts that contradict each other; None if they do not."""
        if not all(isfinite(count) for count in self.counts.values()):
            return "a count that is not a finite number"
        if any(count < 0 for count in self.counts.values()):
            return "a negative count"
        kept, drafted = self._total(ACCEPTED), self._total(DRAFTED)
        if kept is not None and drafted is not None and kept > drafted:
            return f"{kept:.0f} accepted of {counted(round(drafted), 'drafted token')}"
        if self._total(DRAFTS) == 0 and (kept or drafted):
            return (
                f"{counted(round(drafted or kept or 0), 'drafted token' if drafted else 'accepted token')} in no step"
            )
        return self._odd_positions() or self._odd_metrics() or self.contradicted

    def _odd_metrics(self) -> str | None:
        """As `contradiction`, of a server's own counts; the steps of a log follow from rounded figures."""
        totals = {name: self._total(name) for name in _TOTALS}
        if self.form != "metrics" or None in totals.values():
            return None
        if any(count % 1 for count in totals.values() if count is not None):
            return "a count that is not a whole number"
        drafts, drafted = totals[DRAFTS] or 0, totals[DRAFTED] or 0
        return (
            f"{drafts:.0f} steps that drafted {counted(round(drafted), 'token')}"
            if self.tool == "vllm" and drafts > drafted
            else None
        )

    def _odd_positions(self) -> str | None:
        shares = [1.0, *self.rates]
        if any(later > earlier + _ROUNDED for earlier, later in pairwise(shares)):
            return f"the shares {_shown(self.rates)} of steps that accepted position 1, 2, ... and all before it"
        reached = reached_positions(self.counts)
        steps = self._total(DRAFTS)
        if any(later > earlier for earlier, later in pairwise([*([] if steps is None else [steps]), *reached])):
            among = "" if steps is None else f" of {steps:.0f}"
            return f"{_shown(reached)}{among} steps that accepted position 1, 2, ... and all before it"
        return None

    def check_shares(self, rates: Sequence[float], accepted_a_step: float, rounded: float = 0.0) -> None:
        """Note shares of steps by position whose sum is not what a step accepts on average.

        Args:
            rates: share of steps that accepted position 1, 2, ... and all before it, with three decimals or more.
            accepted_a_step: accepted tokens of a step that drafted.
            rounded: how far that may be off.
        """
        if rates and abs(sum(rates) - accepted_a_step) > rounded + len(rates) * _ROUNDED / 2:
            message = f"the shares {_shown(rates)} of steps by position, which add up to {sum(rates):.4g}"
            self.contradicted = f"{message}, and {accepted_a_step:.4g} accepted tokens a step"

    def _total(self, name: str) -> float | None:
        return None if name in self.partial else self.counts.get(name)

    def missing(self) -> list[str]:
        """A sentence about each count that is left out."""
        names = [_TOTALS[name] for name in _TOTALS if name in self.partial]
        message = [f"not every request or result tells its {name}: their number is unknown" for name in names]
        by_position, kept = sum(reached_positions(self.counts)), self._total(ACCEPTED)
        if by_position and kept is not None and round(by_position) != round(kept):
            sums = f"{by_position:.0f}, not to {kept:.0f} accepted tokens"
            message.append(f"counts by position add up to {sums}: rates by position are left out")
        return message

    def stats(self) -> dict[str, Any] | None:
        """Acceptance statistics under the keys of a document's `speculative`; None where the tool gives no counts."""
        known = {name: count for name, count in self.counts.items() if name not in self.partial}
        figures = statistics(known, self.outcomes)
        if figures is None:
            return None
        if self.rates and DRAFTS not in self.partial and not figures["per_position_acceptance_rates"]:
            before = [1.0, *self.rates[:-1]]
            figures["per_position_acceptance_rates"] = list(self.rates)
            figures["conditional_acceptance_rates"] = [
                rate / earlier if earlier else None for rate, earlier in zip(self.rates, before, strict=True)
            ]
        return figures

    def body(self, files: Sequence[Path]) -> dict[str, Any]:
        """The document's own fields. `gates` is empty until the gates are judged."""
        return ImportDocument(
            source=ImportSource(tool=self.tool, form=self.form, files=[str(path) for path in files]),
            speculative=self.stats(),
            reported=self.reported,
            definitions={"acceptance_length": _LENGTH, "acceptance_rate": _RATE} | self.definitions,
            notices=self.notices,
        ).as_json()


def _shown(figures: Sequence[float]) -> str:
    return ", ".join(f"{figure:.4g}" for figure in figures)


def summed(runs: Iterable[ImportedRun]) -> ImportedRun:
    """The counts of several results of one tool; figures that the tool reports itself are kept of the last."""
    first, *others = runs
    num_reporting = sum(bool(run.reported) for run in (first, *others))
    counted = [set(_TOTALS) & set(run.counts) for run in (first, *others) if set(_TOTALS) & set(run.counts)]
    lacking = {name for names in counted for name in set().union(*counted) - names}
    for other in others:
        for name, count in other.counts.items():
            first.counts[name] = first.counts.get(name, 0.0) + count
        first.outcomes.update(other.outcomes)
        first.partial |= other.partial
        first.contradicted = first.contradicted or other.contradicted
        first.add_rates(other.rates, other.weight)
        first.reported |= other.reported
        first.notices += [notice for notice in other.notices if notice not in first.notices]
    first.partial |= lacking
    if num_reporting > 1:
        first.notices.append(f"the figures that {first.tool} itself reports are those of the last result")
    return first
