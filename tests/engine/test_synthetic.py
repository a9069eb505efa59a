"""Synthetic acceptance: the counts are those that were asked for, in every company, and nothing is promised."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_engine import tiny_engine, tiny_lm
from typed import not_none

from specdec_cli.drafted import Drafted
from specdec_cli.drafters.contract import Guesses
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.synthetic import at_depth, conditional, iid_length, solve_alpha, synthetic_rates
from specdec_cli.engine.verify import VerifyRow, verify
from specdec_cli.errors import UsageError
from specdec_cli.recipe.schema import Speculation
from specdec_cli.sampling.chain import ChainRow, distribution
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import RULES, rule_of

NUM = 4000


def verdicts(rates, tokens, temperature, logits=(1.0, 0.5, 0.0, -0.5), num=NUM, bias=None):
    """One step of many seeds with the same drafted tokens."""
    params = [SamplingParams(temperature=temperature, index=i, logit_bias=bias or {}) for i in range(num)]
    scores = torch.tensor([logits] * (len(tokens) + 1)).repeat(num, 1)
    p = distribution(scores, [ChainRow(one, [0], 1, Drafted.chain(tokens), frozenset()) for one in params], len(logits))
    rows = [VerifyRow(RULES["synthetic"], one, 7, Guesses(Drafted.chain(tokens)), conditional(rates)) for one in params]
    return verify(p, rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_positions_stand_at_the_marginal_rates_whatever_was_drafted(temperature: float) -> None:
    rates = (0.8, 0.6, 0.3)
    found = verdicts(rates, [3, 3, 2], temperature)
    for i, rate in enumerate(rates, 1):
        assert np.mean([len(one.path) >= i for one in found]) == pytest.approx(rate, abs=0.03)


def test_the_own_token_is_the_targets() -> None:
    assert {one.own for one in verdicts((0.5,), [3], 0.0)} == {0}
    own = [one.own for one in verdicts((0.5,), [3], 1.0)]
    expected = torch.tensor([1.0, 0.5, 0.0, -0.5]).softmax(0)
    assert np.bincount(own, minlength=4) / NUM == pytest.approx(expected.numpy(), abs=0.03)


def test_a_token_that_cannot_occur_never_stands() -> None:
    assert {len(one.path) for one in verdicts((1.0, 1.0), [3, 1], 0.0, num=50)} == {2}
    banned = (1.0, 0.5, 0.0, float("-inf"))
    assert {len(one.path) for one in verdicts((1.0, 1.0), [1, 3], 0.0, banned, num=50)} == {1}


def test_what_is_drafted_beyond_the_rates_is_refused() -> None:
    assert {len(one.path) for one in verdicts((1.0,), [1, 1, 1], 1.0, num=50)} == {1}


def test_a_row_is_judged_alike_in_any_company() -> None:
    many = verdicts((0.7, 0.5), [2, 1], 1.0, num=60)
    assert verdicts((0.7, 0.5), [2, 1], 1.0, num=5) == many[:5]


@pytest.mark.parametrize("rates", [(0.5, 0.6), (1.2,), (-0.1,)])
def test_rates_that_are_none_are_refused(rates) -> None:
    with pytest.raises(UsageError, match="not marginal rates"):
        conditional(rates)


def test_conditional_rates() -> None:
    assert conditional((0.8, 0.4, 0.0, 0.0)) == pytest.approx((0.8, 0.5, 0.0, 0.0))


@pytest.mark.parametrize(("length", "k"), [(1, 3), (1.5, 1), (2.4, 3), (4, 3), (3.7, 8)])
def test_a_length_becomes_one_chance_for_every_token(length: float, k: int) -> None:
    alpha = solve_alpha(length, k)
    assert iid_length(alpha, k) == pytest.approx(length, abs=1e-9)
    rates = synthetic_rates(Speculation(num_speculative_tokens=k, synthetic_acceptance_length=length))
    assert 1 + sum(not_none(rates)) == pytest.approx(length, abs=1e-9)
    assert conditional(not_none(rates)) == pytest.approx((alpha,) * k, abs=1e-9)


def test_another_depth_keeps_what_each_token_is_worth() -> None:
    length = Speculation(num_speculative_tokens=3, synthetic_acceptance_length=2.5)
    assert not_none(synthetic_rates(at_depth(length, 6)))[:3] == pytest.approx(synthetic_rates(length), abs=1e-9)
    rates = Speculation(num_speculative_tokens=2, synthetic_acceptance_rates=(0.8, 0.5))
    with pytest.raises(UsageError, match="of `4` drafted tokens is not known from `2` rates"):
        at_depth(rates, 4)
    assert synthetic_rates(at_depth(rates, 1)) == (0.8,)
    assert at_depth(Speculation(), 7).num_speculative_tokens == 7
    assert synthetic_rates(at_depth(Speculation(), 7)) is None


def test_the_engine_counts_what_was_asked_for(tmp_path: Path) -> None:
    target, draft = tiny_lm(tmp_path), tiny_lm(tmp_path, seed=1)
    rates = (0.8, 0.6)
    engine = tiny_engine(target, draft, 2, verify="synthetic", synthetic_acceptance_rates=rates)
    outputs = engine.generate([[5, 17, 80]] * 6, SamplingParams(max_new_tokens=100))
    assert not rule_of("synthetic", 0.0).is_lossless
    assert not any(output.lossless for output in outputs)
    assert len({tuple(output.token_ids) for output in outputs}) == 6
    accepted = sum(output.speculative.num_accepted_tokens for output in outputs)
    drafts = sum(output.speculative.num_drafts for output in outputs)
    assert 1 + accepted / drafts == pytest.approx(2.4, abs=0.2)
    again = engine.generate([[5, 17, 80]] * 6, SamplingParams(max_new_tokens=100))
    assert [one.token_ids for one in again] == [one.token_ids for one in outputs]


def test_the_mode_and_its_rates_come_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="synthetic_acceptance_rates"):
        EngineOptions(synthetic_acceptance_rates=(0.5,))
    with pytest.raises(UsageError, match="synthetic_acceptance_rates"):
        EngineOptions(verify="synthetic")
    engine = tiny_engine(tiny_lm(tmp_path))
    with pytest.raises(UsageError, match="needs rates"):
        engine.add([5, 17], verify="synthetic")


def test_of_a_tree_the_first_children_stand_at_the_rates_of_their_depths() -> None:
    drafted = Drafted((3, 2, 1, 3, 2), (-1, -1, 0, 0, 2))
    params = [SamplingParams(temperature=0, index=i) for i in range(NUM)]
    scores = torch.tensor([[1.0, 0.5, 0.0, -0.5]] * 6).repeat(NUM, 1)
    p = distribution(scores, [ChainRow(one, [0], 1, drafted, frozenset()) for one in params], 4)
    rates = (0.8, 0.6, 0.3)
    found = verify(p, [VerifyRow(RULES["synthetic"], one, 7, Guesses(drafted), conditional(rates)) for one in params])
    assert {one.path for one in found} == {(), (0,), (0, 2), (0, 2, 4)}
    assert {one.own for one in found} == {0}
    for depth, rate in enumerate(rates, 1):
        assert np.mean([len(one.path) >= depth for one in found]) == pytest.approx(rate, abs=0.03)


def test_a_trees_length_is_that_of_its_depth() -> None:
    of_tree = Speculation(num_speculative_tokens=6, synthetic_acceptance_length=2.2, tree="3,2")
    assert sum(not_none(synthetic_rates(of_tree))) == pytest.approx(1.2)
    assert len(not_none(synthetic_rates(of_tree))) == 2
