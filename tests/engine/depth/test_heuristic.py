"""The heuristic depth: each sequence's k follows its own last step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_engine import PROMPTS, decode, ngram, tiny_lm, tokens

from specdec_cli.engine.depth.depth import DecodingRow, Heuristic
from specdec_cli.engine.options import EngineOptions
from specdec_cli.errors import UsageError
from specdec_cli.sampling.params import SamplingParams


def row(handle: int, most: int = 8) -> DecodingRow:
    return DecodingRow(handle, "ngram", most, 10)


def ks(policy: Heuristic, results: list[tuple[int, int]], most: int = 8) -> list[int]:
    """k of the steps before and after these results of one sequence."""
    found = policy.choose([row(0, most)], True)
    for drafted, accepted in results:
        policy.observe(0.1, {0: (drafted, accepted)})
        found += policy.choose([row(0, most)], True)
    return found


def test_two_more_after_a_success_and_one_less_after_a_refusal() -> None:
    assert ks(Heuristic(), [(8, 3), (7, 0), (6, 6), (8, 8), (8, 7)]) == [8, 7, 6, 8, 8, 7]
    assert ks(Heuristic(), [(2, 0), (1, 0), (1, 0), (1, 1)], most=2) == [2, 1, 1, 1, 2]


def test_nothing_drafted_changes_nothing() -> None:
    assert ks(Heuristic(), [(8, 1), (0, 0), (0, 0)]) == [8, 7, 7, 7]


def test_sequences_are_apart_and_begin_anew() -> None:
    policy = Heuristic()
    assert policy.choose([row(0), row(1, 3)], True) == [8, 3]
    policy.observe(0.1, {0: (8, 0), 1: (3, 3)})
    assert policy.choose([row(0), row(1, 3), row(2)], False) == [7, 3, 8]
    policy.forget(0)
    assert policy.choose([row(0)], True) == [8]
    assert policy.choose([row(1, 1)], True) == [1], "within what may be drafted now"
    assert policy.choose([row(3, 0)], True) == [0]


def test_text_is_that_of_plain_decoding_and_does_not_depend_on_company(tmp_path) -> None:
    target = tiny_lm(tmp_path, "llama", seed=1)
    for temperature in (0.0, 1.0):
        params = [SamplingParams(24, temperature=temperature, seed=3, index=i) for i in range(len(PROMPTS))]
        together = tokens(decode(target, ngram(), 6, params=params, depth_policy="heuristic"))
        alone = [
            tokens(decode(target, ngram(), 6, [prompt], [one], depth_policy="heuristic"))[0]
            for prompt, one in zip(PROMPTS, params, strict=True)
        ]
        assert together == alone
        if temperature == 0:
            plain = [replace(one, temperature=0.0) for one in params]
            assert together == tokens(decode(target, None, 0, params=plain))


def test_it_has_no_trees() -> None:
    with pytest.raises(UsageError, match="`heuristic` does not fit the tree"):
        EngineOptions(num_speculative_tokens=4, tree="2,2", depth_policy="heuristic")
