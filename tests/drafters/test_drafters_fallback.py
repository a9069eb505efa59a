"""Two drafts for one request: who is asked for what, and what each is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from typed import not_none, stand_in

from specdec_cli import drafters
from specdec_cli.drafted import Drafted
from specdec_cli.drafters.contract import DraftRow, Guesses, Resources, WithoutModel
from specdec_cli.drafters.fallback import DraftWithFallback
from specdec_cli.errors import UsageError
from specdec_cli.sampling.chain import LogitsError
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape


@dataclass
class Knows(WithoutModel):
    """Guesses given tokens for some handles; fails for one."""

    tokens: Mapping[int, Sequence[int]]
    fails_for: int | None = None
    asked: list[DraftRow] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)
    max_context: Any = None
    builds_trees: Any = False
    taps: Any = ()
    sizes: Any = (0, 0)

    def load(self, resources: Resources) -> None:
        self.told.append(resources.num_tokens)

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        return 3

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        self.asked += rows
        for place, row in enumerate(rows):
            if row.handle == self.fails_for:
                raise LogitsError("no numbers", place)
        return [Guesses(Drafted.chain(self.tokens.get(row.handle, ())[: row.k])) for row in rows]

    def release(self, handle: int) -> None:
        self.told.append(handle)

    def clear(self) -> None:
        self.told.append("clear")


def row(handle: int, length: int = 5, k: int = 3, **changes: Any) -> DraftRow:
    params = SamplingParams(temperature=0.0)
    return DraftRow(handle, list(range(length)), 1, k, params, frozenset(), True, False, 0.0, **changes)


def tokens(guesses: Sequence[Guesses]) -> list[tuple[int, ...]]:
    return [guess.drafted.tokens for guess in guesses]


def test_the_second_is_asked_where_the_first_has_nothing() -> None:
    first, second = Knows({0: [7], 2: [8, 9]}), Knows({0: [1], 1: [2, 3, 4, 5], 2: [6]})
    pair = DraftWithFallback(first, second)
    assert tokens(pair.propose([row(0), row(1), row(2), row(3)])) == [(7,), (2, 3, 4), (8, 9), ()]
    assert [one.handle for one in first.asked] == [0, 1, 2, 3]
    assert [one.handle for one in second.asked] == [1, 3]


def test_features_wait_for_the_draft_that_reads_them() -> None:
    """Each position's once and in order, whoever guesses meanwhile."""
    first, second = Knows({}), Knows({}, taps=(0,))
    pair, states = DraftWithFallback(first, second), torch.arange(8.0)[:, None, None]
    given = [(4, states[:3]), (6, states[3:5]), (7, None), (8, states[5:7])]
    for step, (length, features) in enumerate(given):
        first.tokens = {0: [7]} if step < 3 else {}
        asked = row(0, length, features=features)
        before = replace(asked)
        pair.propose([asked])
        assert asked == before
    assert [one.handle for one in second.asked] == [0]
    torch.testing.assert_close(not_none(second.asked[0].features), states[:7])
    pair.propose([row(0, 9, features=states[7:8])])
    torch.testing.assert_close(not_none(second.asked[1].features), states[7:8])
    pair.propose([row(0, 9)])
    assert second.asked[2].features is None


def test_features_are_forgotten_with_their_sequence() -> None:
    first, second = Knows({0: [7]}), Knows({}, taps=(0,))
    pair = DraftWithFallback(first, second)
    pair.propose([row(0, 4, features=torch.ones(3, 1, 1))])
    pair.release(0)
    first.tokens = {}
    pair.propose([row(0, 3, features=torch.zeros(2, 1, 1))])
    torch.testing.assert_close(not_none(second.asked[0].features), torch.zeros(2, 1, 1))


def test_a_row_that_fails_is_named_and_the_others_may_come_again() -> None:
    states = torch.ones(4, 1, 1)
    first, second = Knows({0: [7], 2: [8]}), Knows({3: [5]}, fails_for=1, taps=(0,))
    pair = DraftWithFallback(first, second)
    rows = [row(i, features=states) for i in range(4)]
    with pytest.raises(LogitsError) as error:
        pair.propose(rows)
    assert error.value.row == 1
    assert tokens(pair.propose([rows[0], *rows[2:]])) == [(7,), (8,), (5,)]
    first.tokens = {}
    pair.propose([row(2, 6, features=states[:1])])
    assert len(not_none(second.asked[-1].features)) == 5, "the step that was repeated brought its features once"


def test_a_draft_is_asked_within_its_context_and_for_its_shapes() -> None:
    first, second = Knows({}), Knows({}, max_context=6, builds_trees=True)
    pair = DraftWithFallback(first, second)
    assert pair.max_context is None
    tree = TreeShape.parse("dynamic:2")
    pair.propose([row(0, 5, 4, tree=tree), row(1, 7, 4), row(2, 3, 4)])
    assert [(one.handle, one.k, one.tree) for one in first.asked] == [(0, 2, None), (1, 4, None), (2, 4, None)]
    assert [(one.handle, one.k, one.tree) for one in second.asked] == [(0, 2, tree), (2, 4, None)]
    assert DraftWithFallback(Knows({}, max_context=9), second).max_context == 9


def test_both_are_loaded_released_and_cleared() -> None:
    first, second = Knows({}, sizes=(0, 5)), Knows({}, builds_trees=True, taps=(2,), sizes=(10, 7))
    pair = DraftWithFallback(first, second)
    pair.load(Resources(stand_in(lambda _: None), None, 11))
    pair.release(4)
    pair.clear()
    assert first.told == second.told == [11, 4, "clear"]
    assert (pair.builds_trees, pair.draws, pair.lm, pair.taps) == (True, False, None, (2,))
    assert (pair.sizes, DraftWithFallback(first, Knows({}, sizes=(None, 3))).sizes) == ((10, 12), (None, 8))
    assert pair.adopt(0, [1, 2, 3, 4], "") == 3


def test_parts_of_a_pair_and_of_one_alone() -> None:
    made = drafters.from_fields(drafters.parse_spec("ngram:max=3+suffix+builtin:draft"))
    assert [type(one).__module__.rpartition(".")[2] for one in drafters.parts(made)] == ["ngram", "suffix", "model"]
    alone = drafters.create("ngram", {})
    assert drafters.parts(alone) == [alone]


@pytest.mark.parametrize(("spec", "message"), [
    ("gpt2+ngram", "`gpt2` cannot come before another one"),
    ("none+gpt2", "`none` cannot come before another one"),
    ("ngram+none", "names no draft after the plus sign"),
    ("ngram+", "empty"),
    ("+gpt2", "empty"),
    ("ngram:max=0+gpt2", "`max`|`min`"),
    ("ngram:maxx=3+gpt2", "no option `maxx`"),
    ("ngram+nothing:x", "no drafting method `nothing`"),
])  # fmt: skip
def test_wrong_pairs(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        drafters.parse_spec(spec)


@pytest.mark.parametrize("spec", ["suffix+builtin:draft", "ngram:max=3+suffix:min_prob=0.3+./a+b", "ngram+suffix"])
def test_a_pair_is_written_as_it_was_read(spec: str) -> None:
    assert drafters.to_spec(drafters.parse_spec(spec)) == spec
