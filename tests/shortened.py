"""Parameters of which only some run by default; the rest are marked slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters in their order; those that are not among the quick ones are marked slow."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def in_turn(values: Sequence[Any], first: int, every: int = 2) -> list[Any]:
    """Parameters in their order, of which each `every`-th is quick, from the place `first` on.

    Tests that take the same parameters begin at different places, so that each parameter is quick in some of them.
    """
    return mostly_slow(values, values[first % every :: every])


def rows_in_turn(rows: Sequence[tuple[Any, ...]], first: int, every: int = 2) -> list[Any]:
    """The same for tests of several parameters, whose values are the rows."""
    slow = pytest.mark.slow
    return [row if i % every == first % every else pytest.param(*row, marks=slow) for i, row in enumerate(rows)]


def pairs_in_turn(ones: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Each value of one parameter with each of another; every second pair is quick, and so is each value in some."""
    return [
        (one, other) if (i + j) % 2 == 0 else pytest.param(one, other, marks=pytest.mark.slow)
        for i, one in enumerate(ones)
        for j, other in enumerate(others)
    ]
