"""Counts of speculation that a server keeps, in the place of those that our own engine's steps give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdec_cli.events import SpeculativeCounts
from specdec_cli.measure.endpoint.counters import statistics


@dataclass(slots=True)
class ServerCounts(SpeculativeCounts):
    """Increase of a server's counters over some passes.

    Servers count neither steps without a draft nor seconds, so `num_steps` and the seconds stay 0. Rates by position
    are empty where steps drafted different numbers of tokens.

    Args:
        added: counter to its increase.
    """

    added: Counter[str] = field(default_factory=Counter)

    def add_run(self, counters: Mapping[str, float], num_decoded_tokens: int) -> None:
        """Count a pass: its counters' increase, and its output tokens after the first ones."""
        for name, value in counters.items():
            self.added[name] += round(value)
        self.num_emitted_tokens += num_decoded_tokens

    @property
    def num_drafts(self) -> int:
        """Steps that verified drafted tokens."""
        return self._count("num_drafts")

    @property
    def num_draft_tokens(self) -> int:
        """Drafted tokens that were verified."""
        return self._count("num_draft_tokens")

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that stood."""
        return self._count("num_accepted_tokens")

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

    def _count(self, name: str) -> int:
        return self.added[f"spec_decode_{name}"]

    def _listed(self, name: str) -> list[Any]:
        found: list[Any] = (statistics(self.added) or {}).get(name) or []
        return found
