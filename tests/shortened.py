"""Tests of which only some cases run by default; the rest are marked slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

ParameterSet = type(pytest.param())


def mostly_slow(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters in their order; those that are not among the quick ones are marked slow."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def is_out_of_turn(item: pytest.Item) -> bool:
    """Whether a case is one of those that `in_turn` leaves out.

    Of the cases of a test that is marked `in_turn(first, every=2)` each `every`-th runs by default, from the place
    `first` on. A case's place is that of its parameters in their list; of several lists it is the sum of their places,
    so that each parameter has its turn.

    Tests that take the same parameters begin at different places, so that each has its turn in some of them.
    """
    mark = item.get_closest_marker("in_turn")
    if mark is None:
        return False
    (first,), every = mark.args, mark.kwargs.get("every", 2)
    lists = [parameters.args for parameters in item.iter_markers("parametrize")]
    num_places = 1 + sum(len(values) - 1 for _, values in lists)
    assert first < min(every, num_places), f"{item.nodeid}: no case would run"
    return bool(sum(_place(item, *of) for of in lists) % every != first)


def _place(item: Any, names: str | Sequence[str], values: Iterable[Any]) -> int:
    its = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    own = [item.callspec.params[name] for name in its]
    for place, value in enumerate(values):
        row = value.values if isinstance(value, ParameterSet) else value if len(its) > 1 else (value,)
        if all(one is other for one, other in zip(row, own, strict=True)):
            return place
    raise AssertionError(f"{item.nodeid}: its parameters are in a list that can be read again")
