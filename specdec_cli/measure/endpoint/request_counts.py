"""A request's own counts of speculation, in the fields by which each engine reports them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from specdec_cli.document import SpeculativeResult
from specdec_cli.measure.endpoint.server_counts import (
    ACCEPTED,
    DRAFTED,
    DRAFTS,
    NODES,
    position_key,
    statistics,
)


@dataclass(frozen=True, slots=True)
class CountNames:
    """An engine's names of a request's counts; empty for those that it does not report.

    Args:
        drafted: drafted tokens.
        accepted: accepted drafted tokens.
        steps: verification steps.
        histogram: steps by how many drafted tokens they accepted, from 0.
    """

    drafted: str
    accepted: str
    steps: str = ""
    histogram: str = ""


VLLM = CountNames("num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps", "acceptance_histogram")
SGLANG = CountNames(
    "spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_verify_ct", "spec_correct_drafts_histogram"
)
TRTLLM = CountNames("total_draft_tokens", "total_accepted_draft_tokens", "num_spec_steps", "acceptance_histogram")
LLAMA = CountNames("draft_n", "draft_n_accepted")
CountsSource = Literal["answers", "counters"]
"""Answers that each count their own drafts, or else the increase of the server's counters."""
_PER_STEP = "per_step_drafted", "per_step_accepted"


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """Numbers of tokens that requests drafted and accepted.

    Args:
        counts: by vLLM's names of counters, as `statistics` takes them.
        outcomes: steps by the numbers of tokens that they drafted and accepted, where they are listed.
    """

    counts: Mapping[str, int]
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def has_steps(self) -> bool:
        """Whether steps are counted, so that the server's counters have nothing to add."""
        return DRAFTS in self.counts


def request_counts(chunk: Mapping[str, Any]) -> AnswerCounts | None:
    """The counts in a response, or in a chunk of a stream; None where it holds none.

    Counts that contradict each other are left out.
    """
    choices = chunk.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    for names, figures in (
        (VLLM, _inner(chunk, "metrics", "speculative_decoding")),
        (SGLANG, _inner(chunk, "sglext", "spec_tokens_details")),
        (TRTLLM, _inner(choice, "speculative_decoding")),
        (LLAMA, _inner(chunk, "timings")),
    ):
        if (known := _read(figures, names)) is not None:
            return known
    details = _inner(chunk, "usage", "completion_tokens_details")
    accepted, rejected = (whole(details.get(f"{kind}_prediction_tokens")) for kind in ("accepted", "rejected"))
    if not accepted and not rejected:
        return None
    return None if accepted is None or rejected is None else AnswerCounts(_totals(accepted + rejected, accepted))


def joint_source(sources: Iterable[CountsSource | None]) -> CountsSource | None:
    """The source of several counts together: counters if any needed them; None of none."""
    known = set(sources)
    return "counters" if "counters" in known else "answers" if "answers" in known else None


def together(requests: Sequence[AnswerCounts]) -> AnswerCounts:
    """Counts of several requests; without steps unless all count theirs."""
    total, outcomes = Counter[str](), Counter[tuple[int, int]]()
    for own in requests:
        total.update(own.counts)
        outcomes.update(own.outcomes)
        if NODES not in own.counts:
            total[NODES] += own.counts[DRAFTED]
    if not all(own.has_steps for own in requests):
        del total[DRAFTS]
    return AnswerCounts(total, outcomes)


def pooled(requests: Sequence[AnswerCounts]) -> SpeculativeResult:
    """Acceptance statistics of several requests together: ratios of their totals, never means of their ratios."""
    own = together(requests)
    return SpeculativeResult(**(statistics(own.counts, own.outcomes) or {}))


def step_outcomes(figures: Mapping[str, Any], names: CountNames) -> Counter[tuple[int, int]]:
    """Steps by drafted and accepted tokens, from vLLM's lists of `detailed`; none unless they add up to the totals."""
    drafted, accepted = (figures.get(name) for name in _PER_STEP)
    if not isinstance(drafted, list) or not isinstance(accepted, list) or len(drafted) != len(accepted):
        return Counter()
    pairs = [(whole(most), whole(kept)) for most, kept in zip(drafted, accepted, strict=True)]
    known = [(most, kept) for most, kept in pairs if most is not None and kept is not None and kept <= most]
    listed = [len(known), sum(most for most, _ in known), sum(kept for _, kept in known)]
    totals = [whole(figures.get(name)) for name in (names.steps, names.drafted, names.accepted)]
    return Counter(known if len(known) == len(pairs) and listed == totals else ())


def whole(value: object) -> int | None:
    """A count as an integer; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _read(figures: Mapping[str, Any], names: CountNames) -> AnswerCounts | None:
    drafted, accepted = whole(figures.get(names.drafted)), whole(figures.get(names.accepted))
    steps = whole(figures.get(names.steps))
    if drafted is None or accepted is None or accepted > drafted or (not drafted and steps is None):
        return None
    counts = _totals(drafted, accepted)
    nodes = whole(figures.get("num_draft_nodes"))
    counts |= {name: count for name, count in ((DRAFTS, steps), (NODES, nodes)) if count is not None}
    histogram = figures.get(names.histogram)
    if steps is not None and isinstance(histogram, list):
        counts |= _positions(histogram, steps, accepted)
    return AnswerCounts(counts, step_outcomes(figures, names))


def _totals(drafted: int, accepted: int) -> dict[str, int]:
    return {DRAFTED: drafted, ACCEPTED: accepted}


def _positions(histogram: Sequence[Any], num_steps: int, num_accepted: int) -> dict[str, int]:
    """Steps that accepted at least 1, 2, … tokens; none where the histogram is of other steps."""
    steps = [whole(count) or 0 for count in histogram]
    if sum(steps) != num_steps or sum(kept * count for kept, count in enumerate(steps)) != num_accepted:
        return {}
    return {position_key(place): sum(steps[place + 1 :]) for place in range(len(steps) - 1)}


def _inner(chunk: object, *keys: str) -> Mapping[str, Any]:
    """An object inside a chunk; an empty one where there is none."""
    value: Any = chunk
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}
