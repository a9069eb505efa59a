"""Acceptance by counts that a server or a log keeps, in the place of those that our own engine's steps give.

Counts go by vLLM's names of counters without its prefix, whatever they were read from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_cli.events import SpeculativeCounts

_PREFIX = "spec_decode_num_"
DRAFTS, DRAFTED, ACCEPTED = f"{_PREFIX}drafts", f"{_PREFIX}draft_tokens", f"{_PREFIX}accepted_tokens"
NODES = f"{_PREFIX}draft_nodes"


def labelled(name: str, value: object, label: str) -> str:
    """The key of a counter with a label, as Prometheus writes it."""
    return f'{name}{{{label}="{value}"}}'


def position_key(place: int) -> str:
    """The key of the counter of steps that accepted a position, counted from 0, and all before it."""
    return labelled(f"{ACCEPTED}_per_pos", place, "position")


def reached_positions(counts: Mapping[str, float]) -> list[float]:
    """How many steps accepted position 1, 2, … and all before it, as far as positions are counted."""
    reached: list[float] = []
    while (key := position_key(len(reached))) in counts:
        reached.append(counts[key])
    return reached


def statistics(added: Mapping[str, float], outcomes: Counter[tuple[int, int]] | None = None) -> dict[str, Any] | None:
    """Acceptance statistics from counters' differences; None without counters, null where one is missing.

    Rates by position need the number of steps that drafted so far, which engines do not count; they follow only
    where every step drafted as much as there are positions, or is listed. The histogram needs no such thing.

    Args:
        added: counter to its increase.
        outcomes: steps by drafted and accepted tokens; they count if they are all steps.
    """
    drafts, drafted, accepted = (_count(added, name) for name in (DRAFTS, DRAFTED, ACCEPTED))
    if drafts is None and drafted is None and accepted is None:
        return None
    return {
        "num_drafts": drafts,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "num_emitted_tokens": None,
        "acceptance_rate": accepted / drafted if drafted and accepted is not None else None,
        "acceptance_length": 1 + accepted / drafts if drafts and accepted is not None else None,
        **(
            _listed_positions(outcomes)
            if outcomes and outcomes.total() == drafts
            else _positions(drafts, drafted, _by_position(added, accepted))
        ),
        **_trees(added, drafted),
        "draft_seconds": None,
        "verify_seconds": None,
        "overhead_seconds": None,
    }


def _listed_positions(outcomes: Counter[tuple[int, int]]) -> dict[str, Any]:
    """The statistics by position, exact for drafts of any length, from steps by drafted and accepted tokens."""
    counts = SpeculativeCounts(outcomes=outcomes)
    return {
        "per_position_acceptance_rates": counts.per_position_acceptance_rates,
        "conditional_acceptance_rates": counts.conditional_acceptance_rates,
        "acceptance_histogram": counts.acceptance_histogram,
    }


def _trees(added: Mapping[str, float], drafted: int | None) -> dict[str, Any]:
    """The statistics that only trees have; none where no server counted any."""
    nodes = _count(added, NODES)
    if nodes is None or drafted is None or nodes <= drafted:
        return {}
    rates: list[float | None] = []
    while (key := labelled(f"{_PREFIX}alternatives_per_rank", len(rates) + 1, "rank")) in added:
        accepted = added.get(labelled(f"{ACCEPTED}_per_rank", len(rates) + 1, "rank"), 0.0)
        rates.append(accepted / added[key] if added[key] else None)
    return {"num_draft_nodes": nodes, "acceptance_by_rank": rates}


def _positions(drafts: int | None, drafted: int | None, reached: Sequence[int] | None) -> dict[str, Any]:
    """The statistics by position, from how often at least 1, 2, … tokens were accepted."""
    rates = conditional = histogram = None
    if drafts is not None and reached is not None:
        at_least = [drafts, *reached]
        histogram = [more - fewer for more, fewer in zip(at_least, [*reached, 0], strict=True)]
        if drafted == drafts * len(reached):
            rates, conditional = _ratios(reached, [drafts] * len(reached)), _ratios(reached, at_least[:-1])
    return {
        "per_position_acceptance_rates": rates,
        "conditional_acceptance_rates": conditional,
        "acceptance_histogram": histogram,
    }


def _count(added: Mapping[str, float], name: str) -> int | None:
    return round(added[name]) if name in added else None


def _by_position(added: Mapping[str, float], accepted: int | None) -> list[int] | None:
    """How often at least 1, 2, … tokens were accepted; None where the server does not say, or contradicts itself."""
    reached = [round(count) for count in reached_positions(added)]
    is_whole = len(reached) == sum(name.startswith(f"{ACCEPTED}_per_pos{{") for name in added)
    return reached if reached and is_whole and sum(reached) == accepted else None


def _ratios(numerators: Sequence[int], denominators: Sequence[int]) -> list[float | None]:
    return [above / below if below else None for above, below in zip(numerators, denominators, strict=True)]


@dataclass(slots=True)
class ServerCounts(SpeculativeCounts):
    """A server's own counts over some passes, of its answers or of its counters.

    Servers count neither steps without a draft nor seconds, so `num_steps` and the seconds stay 0. Rates by position
    are empty where steps drafted different numbers of tokens and are not all listed.

    Args:
        added: counter to its increase.
    """

    added: Counter[str] = field(default_factory=Counter)

    def add_run(
        self,
        counters: Mapping[str, int],
        num_decoded_tokens: int,
        outcomes: Counter[tuple[int, int]] | None = None,
    ) -> None:
        """Count a pass: its counts, its output tokens after the first ones, and its steps where they are listed."""
        self.added.update(counters)
        self.num_emitted_tokens += num_decoded_tokens
        self.outcomes.update(outcomes or {})

    @property
    def num_drafts(self) -> int:
        """Steps that verified drafted tokens."""
        return self.added[DRAFTS]

    @property
    def num_draft_tokens(self) -> int:
        """Drafted tokens that were verified."""
        return self.added[DRAFTED]

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that stood."""
        return self.added[ACCEPTED]

    @property
    def per_position_acceptance_rates(self) -> list[float | None]:
        """P(accepted >= i) for i = 1..k; empty where it is not known."""
        return self._listed("per_position_acceptance_rates")

    @property
    def conditional_acceptance_rates(self) -> list[float | None]:
        """P(accepted >= i | accepted >= i-1) for i = 1..k; empty where it is not known."""
        return self._listed("conditional_acceptance_rates")

    @property
    def acceptance_histogram(self) -> list[int]:
        """Steps that accepted exactly 0..k drafted tokens; empty where it is not known."""
        return self._listed("acceptance_histogram")

    def _listed(self, name: str) -> list[Any]:
        return list((statistics(self.added, self.outcomes) or {}).get(name) or [])
