"""Profiles between the passes: how many, where, and what the costs are made of."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from typed import not_none, stand_in

from specdec_cli.measure.bench.in_turn import InTurn
from specdec_cli.measure.documents.sweep_k import costs_result
from specdec_cli.measure.predict.cost import ENOUGH, Costs, ProfileLoad, Rounds, joined
from specdec_cli.tree_shape import TreeShape

NAMES = ("target_seconds", "draft_seconds", "overhead_seconds")


def costs(seconds: float, num_rounds: int = 1, overhead: float = 0.001) -> Costs:
    """A profile in which everything takes these seconds."""
    table = np.full((num_rounds, 1, 3), seconds)
    rounds = Rounds(table, table, np.full((num_rounds, 3), overhead))
    load = ProfileLoad(seconds, seconds, 2)
    return Costs(2, (16,), table[0], table[0], rounds.overhead[0], 1, num_rounds, 1.0, load, rounds)


def taken(num_turns: int, num_done: int) -> tuple[InTurn, list[Any]]:
    """Profiles of a run of so many turns, of which so many were made, and what was asked for."""

    def measure(name, first, num_rounds, overhead_seconds):
        calls.append((name, first, num_rounds, overhead_seconds is None))
        return costs(1.0, num_rounds)

    calls: list[Any] = []
    found = InTurn(measure, stand_in(lambda _: None))
    for turn in range(num_done):
        found.before(turn, num_turns)
    found.after()
    return found, calls


@pytest.mark.parametrize("num_turns", [1, 2, 3, 4, 5, 6, 12, 13, 24, 48, 500])
def test_there_are_rounds_enough_evenly_spread_and_not_too_many(num_turns: int) -> None:
    found, calls = taken(num_turns, num_turns)
    assert ENOUGH <= found.num_rounds <= 13
    assert [first for _, first, _, _ in calls] == list(np.cumsum([0] + [num for _, _, num, _ in calls])[:-1])
    turns = [int(name.split()[-1]) for name, *_ in calls[:-1]]
    assert turns[0] == 0
    assert len(set(np.diff(turns))) <= 1
    assert calls[-1][0] == "after the last turn"
    assert [is_due for *_, is_due in calls] == [i % 3 == 0 for i in range(len(calls))]


def test_a_run_that_ends_early_makes_up_for_its_rounds_at_the_end() -> None:
    found, calls = taken(240, 8)
    assert (len(calls), found.num_rounds) == (2, ENOUGH)


def test_costs_are_those_of_the_same_minutes() -> None:
    found = InTurn(lambda *_: costs(3.0), stand_in(lambda _: None))
    before = costs(1.0, 8)
    assert found.costs(before) is before
    found.before(0, 6)
    few = found.costs(before)
    assert (few.num_repeats, few.num_in_turn) == (9, 1)
    assert few.target_seconds[0, 0] == 1.0
    for turn in range(1, 6):
        found.before(turn, 6)
    enough = found.costs(before)
    assert (enough.num_repeats, enough.num_in_turn, enough.target_seconds[0, 0]) == (6, 6, 3.0)
    assert costs_result(enough).rounds_in_turn == 6


def test_joined_costs_are_the_medians_of_all_rounds() -> None:
    several = [costs(1.0, 1, 0.1), costs(2.0, 3, 0.2), costs(9.0, 1, 0.3)]
    found = joined(several)
    assert (found.num_repeats, found.seconds) == (5, 3.0)
    assert (found.load.before, found.load.after) == (1.0, 9.0)
    for table in (found.target_seconds, found.draft_seconds):
        assert table == pytest.approx(np.full((1, 3), 2.0))
    assert found.overhead_seconds == pytest.approx(0.2)
    assert np.median(found.drawn(), axis=0) == pytest.approx(found.flat)


def test_trees_that_one_profile_lacks_are_left_out() -> None:
    trees = tuple(map(TreeShape.parse, ("2", "3", "4")))

    def of_trees(one: Costs, *chosen: TreeShape) -> Costs:
        """Costs with columns of trees, each at as many seconds as its text says."""
        extra = np.array([float(str(tree)) for tree in chosen])
        rounds = not_none(one.rounds)
        wide = [
            np.concatenate([part, np.broadcast_to(extra, (*part.shape[:-1], len(extra)))], axis=-1)
            for part in (rounds.target, rounds.draft, rounds.overhead)
        ]
        medians = [np.median(part, axis=0) for part in wide]
        return replace(one, **dict(zip(NAMES, medians, strict=True)), rounds=Rounds(*wide), trees=chosen)

    before, later = of_trees(costs(1.0, 2), *trees[:2]), of_trees(costs(3.0, 3), trees[2], trees[1])
    found = joined([before, later])
    assert found.trees == trees[1:2]
    assert found.num_columns == found.target_seconds.shape[1] == len(found.overhead_seconds) == 4
    assert found.target_seconds[0, 3] == found.draft_seconds[0, 3] == found.overhead_seconds[3] == 3.0
    assert found.target_seconds[0, :3] == pytest.approx(joined([costs(1.0, 2), costs(3.0, 3)]).target_seconds[0])
