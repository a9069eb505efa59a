"""Estimates of how many of the requested tokens are drafted and accepted, by request and by drafter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from specdec_cli.engine.depth.depth import DecodingRow
from specdec_cli.engine.depth.survival import Survival

Outcome = tuple[Sequence[DecodingRow], list[int], Mapping[int, tuple[int, int]]]
"""Request and result of a step: rows, k of each, and tokens drafted and accepted by sequence."""


@dataclass(slots=True)
class Acceptance:
    """Learned from steps; a request begins with what its drafter's others showed, which stays when it ends."""

    _pools: dict[str, Survival] = field(default_factory=dict)
    _drafts: dict[str, Survival] = field(default_factory=dict)  # how much of what is asked for a drafter drafts
    _survivals: dict[int, tuple[str, Survival]] = field(default_factory=dict)

    def meet(self, wishes: Sequence[DecodingRow]) -> None:
        """Keep a book for each request from now on."""
        for wish in wishes:
            if wish.handle not in self._survivals:
                self._survivals[wish.handle] = wish.drafter, Survival(self._pool(wish.drafter))
                self._draft(wish.drafter)

    def forget(self, handle: int) -> None:
        """Close a request's book."""
        self._survivals.pop(handle, None)

    def tokens(self, wishes: Sequence[DecodingRow], most: int, is_new: bool = False) -> list[float]:
        """Tokens expected of a step, by k = 0 … most; `is_new`: if these requests had only begun."""
        alive = (self._survival(wish, is_new).curve(wish.most) + [0.0] * (most - wish.most) for wish in wishes)
        return list(accumulate(map(sum, zip(*alive, strict=True)), initial=float(len(wishes))))

    def drafting(self, wishes: Sequence[DecodingRow], most: int) -> list[float]:
        """P(at least j tokens are drafted for a row that may draft), j = 1 … most, in the mean over these rows."""
        mosts: dict[str, list[int]] = {}
        for wish in wishes:
            mosts.setdefault(wish.drafter, []).append(wish.most)
        shares = [0.0] * most
        for name, each in mosts.items():
            for j, drafts in enumerate(self._draft(name).curve(most)):
                num = len(each) if j < min(each) else sum(own > j for own in each)
                shares[j] += drafts * num / len(wishes)
        return shares

    def learn(self, steps: Sequence[Outcome]) -> tuple[list[float | None], float]:
        """Learn from steps of requests that were met.

        Returns:
            By step, tokens drafted over the rows that may draft, None where all of those ended; and a row's tokens in
            all steps, in the mean over rows.
        """
        drafted: list[float | None] = []
        num_tokens = 0.0
        outcomes: Counter[tuple[int, int, int, int]] = Counter()
        for wishes, ks, given in steps:
            num_drafting = num_drafted = num_accepted = 0
            for wish, asked in zip(wishes, ks, strict=True):
                handle = wish.handle
                if handle in given:
                    num_drafting += wish.most > 0
                    if asked:
                        found, accepted = given[handle]
                        outcomes[handle, asked, found, accepted] += 1
                        num_drafted += found
                        num_accepted += accepted
            drafted.append(num_drafted / num_drafting if num_drafting else None)
            num_tokens += 1 + num_accepted / len(wishes)
        of_drafters: Counter[tuple[str, int, int, int]] = Counter()
        for (handle, asked, found, accepted), num in outcomes.items():
            name, survival = self._survivals[handle]
            survival.add(asked, accepted, num)
            of_drafters[name, asked, found, accepted] += num
        for (name, asked, found, accepted), num in of_drafters.items():
            self._pool(name).add(asked, accepted, num)
            self._draft(name).add(asked, found, num)
        return drafted, num_tokens

    def _survival(self, wish: DecodingRow, is_new: bool) -> Survival:
        own = None if is_new else self._survivals.get(wish.handle)
        return own[1] if own else self._pool(wish.drafter)

    def _pool(self, name: str) -> Survival:
        return self._pools.setdefault(name, Survival())

    def _draft(self, name: str) -> Survival:
        return self._drafts.setdefault(name, Survival(expected=1.0))
