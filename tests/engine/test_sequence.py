"""A sequence takes what a step gives it and cuts where the request ends."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_cli.drafted import NOTHING, Drafted
from specdec_cli.engine.sequence import Sequence
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import RULES


def sequence(max_tokens: int = 100, stop_ids: frozenset[int] = frozenset(), **params: Any) -> Sequence:
    return Sequence(0, [1, 2, 3], 3, SamplingParams(**params), stop_ids, RULES["greedy"], 4, max_tokens, None)


def test_the_first_token_belongs_to_no_step() -> None:
    one = sequence()
    assert one.extend(NOTHING, (), 7, []).from_prefill
    assert not one.extend(NOTHING, (), 8, []).from_prefill
    assert one.tokens == [1, 2, 3, 7, 8]


def test_accepted_tokens_come_before_the_own_one() -> None:
    emitted = sequence().extend(Drafted.chain([5, 6, 7, 8]), range(2), 9, [])
    assert emitted.tokens == (5, 6, 9)
    assert (emitted.num_drafted, emitted.num_accepted) == (4, 2)


@pytest.mark.parametrize(("num_accepted", "kept", "counted"), [(4, (5, 6), 2), (1, (5, 9), 1)])
def test_a_stop_token_cuts_accepted_tokens_and_counts_up_to_the_cut(
    num_accepted: int, kept: tuple[int, ...], counted: int
) -> None:
    one = sequence(stop_ids=frozenset({6}))
    emitted = one.extend(Drafted.chain([5, 6, 7, 8]), range(num_accepted), 9, [])
    assert emitted.tokens == kept
    assert emitted.num_accepted == counted
    assert (one.finish_reason, one.stop_reason) == (("stop", 6) if num_accepted == 4 else (None, None))


def test_a_length_cuts_and_has_no_stop_reason() -> None:
    one = sequence(max_tokens=5)
    assert one.extend(Drafted.chain([5, 6, 7]), range(3), 9, []).tokens == (5, 6)
    assert (one.finish_reason, one.stop_reason) == ("length", None)


def test_a_stop_token_at_the_last_place_is_a_stop() -> None:
    one = sequence(max_tokens=5, stop_ids=frozenset({6}))
    one.extend(Drafted.chain([5, 6, 7]), range(3), 9, [])
    assert one.finish_reason == "stop"


def test_logprobs_are_cut_with_their_tokens() -> None:
    one = sequence(max_tokens=4)
    marks: list[Any] = ["a", "b", "c"]
    assert one.extend(Drafted.chain([5, 6]), range(2), 9, marks).logprobs == ("a",)
