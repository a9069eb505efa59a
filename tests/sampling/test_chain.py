from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from typed import not_none, stand_in

from specdec_cli.drafted import Drafted
from specdec_cli.errors import RunError
from specdec_cli.sampling.chain import ChainRow, LogitsError, distribution, inverse_cdf
from specdec_cli.sampling.noise import Purpose, uniforms_many
from specdec_cli.sampling.params import SamplingParams

V = 50
PROMPT = [3, 9, 9, 21]
OUTPUT = [7, 7, 3, 40]


def logits_of(n, seed=0, num_tokens=V):
    return 3 * torch.randn(n, num_tokens, generator=torch.Generator().manual_seed(seed))


def row(params, drafted=(), context=None, num_prompt_tokens=4, stop_ids=()):
    context = PROMPT + OUTPUT if context is None else context
    return ChainRow(params, context, num_prompt_tokens, Drafted.chain(drafted), frozenset(stop_ids))


def oracle(logits, params, context):
    """Probabilities by transformers' processors in EXACTNESS.md's order; presence and frequency by hand."""
    ids = torch.tensor([context])
    scores = logits[None].clone()
    if params.logit_bias:
        bias = {(token,): value for token, value in params.logit_bias.items()}
        scores = SequenceBiasLogitsProcessor(bias)(ids, scores)
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    output = torch.tensor(context[len(PROMPT) :], dtype=torch.int64).bincount(minlength=V)
    scores = scores - params.presence_penalty * (output > 0) - params.frequency_penalty * output
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k is not None:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(ids, scores).softmax(dim=-1)[0]


ONE = [
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"temperature": 0.05},
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 0.8},
    {"frequency_penalty": 0.6},
    {"logit_bias": {3: 4.0, 11: -5.0}},
]
MANY = [
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 10, "top_p": 0.5},
    {"temperature": 0.6, "top_p": 0.95, "min_p": 0.2, "repetition_penalty": 1.2},
    {
        "temperature": 1.1,
        "top_k": 30,
        "top_p": 0.8,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.4,
        "logit_bias": {7: 3.0, 40: -2.0},
    },
]


@pytest.mark.parametrize("options", ONE + MANY, ids=str)
def test_probabilities_are_those_of_transformers_processors(options) -> None:
    params = SamplingParams(**{"temperature": 1.0, **options})
    drafted = [5, 7, 12]
    logits = logits_of(4)
    probs = distribution(logits, [row(params, drafted)], V).probs
    for j in range(4):
        expected = oracle(logits[j], params, PROMPT + OUTPUT + drafted[:j])
        assert torch.equal(not_none(probs)[j] > 0, expected > 0)
        torch.testing.assert_close(not_none(probs)[j], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("options", MANY, ids=str)
def test_temperature_zero_is_the_argmax_after_bias_and_penalties(options) -> None:
    params = SamplingParams(**{**options, "temperature": 0.0})
    logits = logits_of(40, seed=4)
    rows = [row(params, drafted=[i % V]) for i in range(20)]
    p = distribution(logits, rows, V)
    assert p.probs is None
    for i in range(20):
        for j in range(2):
            warm = replace(params, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0)
            expected = oracle(logits[2 * i + j], warm, PROMPT + OUTPUT + [i % V][:j])
            assert int(p.argmax[2 * i + j]) == int(expected.argmax())
    assert torch.equal(p.dense().argmax(dim=-1), p.argmax)
    assert torch.equal(p.dense().sum(dim=-1), torch.ones(40))


def test_rows_of_different_parameters_in_one_call_are_bit_for_bit_what_they_are_alone() -> None:
    options = [{"temperature": 0.0}, *ONE, *MANY, {"temperature": 0.0, "repetition_penalty": 1.5}]
    rows = [
        row(SamplingParams(**{"temperature": 1.0, **stand_in(one)}), list(range(i % 4)))
        for i, one in enumerate(options)
    ]
    lengths = [len(one.drafted) + 1 for one in rows]
    logits = logits_of(sum(lengths), seed=1)
    together = distribution(logits, rows, V)
    first = 0
    for one, length in zip(rows, lengths, strict=True):
        alone = distribution(logits[first : first + length].clone(), [one], V)
        here = slice(first, first + length)
        assert torch.equal(together.dense()[here], alone.dense())
        assert torch.equal(together.argmax[here], alone.argmax)
        assert together.one_hot[here].tolist() == alone.one_hot.tolist()
        assert together.logprobs([(first, 3, 4), (0, 5, 2)])[:1] == alone.logprobs([(0, 3, 4)])
        first += length


def test_the_callers_logits_stay_as_they_were() -> None:
    logits = logits_of(2)
    before = logits.clone()
    params = SamplingParams(temperature=0.9, repetition_penalty=2.0, logit_bias={1: 3.0}, min_tokens=9, top_k=3)
    distribution(logits, [row(params, [1], stop_ids={2})], V)
    assert torch.equal(logits, before)


def test_plain_greedy_copies_nothing() -> None:
    logits = logits_of(3)
    p = distribution(logits, [row(SamplingParams(), [1, 2])], V)
    assert p.scores.data_ptr() == logits.data_ptr()
    assert p.probs is None


def test_ties_keep_the_first_tokens() -> None:
    logits = torch.zeros(1, 8)
    kept = {
        (): SamplingParams(temperature=1.0, top_k=3),
        ("top_p",): SamplingParams(temperature=1.0, top_p=0.3),
    }
    for params in kept.values():
        probs = distribution(logits, [row(params, context=[0], num_prompt_tokens=1)], 8).probs
        assert not_none(probs)[0].nonzero()[:, 0].tolist() == [0, 1, 2]
    greedy = distribution(torch.tensor([[1.0, 5.0, 5.0]]), [row(SamplingParams(), context=[0])], 3)
    assert greedy.argmax.tolist() == [1]


def test_top_p_keeps_the_smallest_set_with_enough_mass() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for top_p, num_kept in [(0.4, 1), (0.51, 2), (0.74, 2), (0.8, 3), (0.9, 4)]:
        params = SamplingParams(temperature=1.0, top_p=top_p)
        probs = distribution(logits, [row(params, context=[0])], 4).probs
        assert int((not_none(probs) > 0).sum()) == num_kept
        assert float(not_none(probs).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-45, 1e-300])
def test_a_tiny_temperature_neither_overflows_nor_loses_ties(temperature: float) -> None:
    logits = torch.tensor([[30.0, 88.0, 88.0, -1e30], [1.0, 2.0, 3.0, float("-inf")]])
    params = SamplingParams(temperature=temperature)
    probs = distribution(logits, [row(params, [1], context=[0])], 4).probs
    assert not_none(probs).tolist() == [[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0]]


def test_padding_of_the_vocabulary_is_never_chosen() -> None:
    logits = logits_of(2, num_tokens=64)
    logits[:, 60] = 99.0
    for temperature in (0.0, 1.0):
        p = distribution(logits, [row(SamplingParams(temperature=temperature), [1])], V)
        assert p.dense().shape == (2, V)
        assert p.argmax.max() < V


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_are_banned_until_enough_tokens_are_emitted_drafted_ones_counted(temperature: float) -> None:
    logits = logits_of(4)
    logits[:, [2, 8]] = 50.0
    params = SamplingParams(temperature=temperature, min_tokens=len(OUTPUT) + 2)
    probs = distribution(logits, [row(params, [1, 1, 1], stop_ids={2, 8, 4000})], V).dense()
    assert (probs[:, [2, 8]].sum(dim=-1) > 0).tolist() == [False, False, True, True]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_logits_are_an_error_that_names_the_row(value, temperature: float) -> None:
    logits = logits_of(5)
    logits[2, 7] = value
    params = SamplingParams(temperature=temperature)
    with pytest.raises(LogitsError) as caught:
        distribution(logits, [row(params, [1]), row(params, [2, 3])], V)
    assert caught.value.row == 1
    assert isinstance(caught.value, RunError)
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_tokens_banned_is_an_error_of_that_row(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=99)
    rows = [row(params), row(params, stop_ids=range(V))]
    with pytest.raises(LogitsError, match="every token is banned") as caught:
        distribution(logits_of(2), rows, V)
    assert caught.value.row == 1


def test_a_position_behind_a_drafted_token_is_told_of_and_no_error() -> None:
    logits = logits_of(5)
    logits[3] = float("nan")
    untouched = logits.clone()
    rows = [row(SamplingParams(temperature=1.0), [1]), row(SamplingParams(temperature=1.0), [4, 5])]
    p = distribution(logits, rows, V)
    assert list(p.broken) == [3]
    assert "after `9` tokens" in p.broken[3].message
    assert not_none(p.probs).isfinite().all()
    assert torch.equal(logits.nan_to_num(), untouched.nan_to_num())


def test_tokens_beyond_the_vocabulary_in_a_prompt_are_no_concern_of_penalties() -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0)
    logits = logits_of(1)
    seen = distribution(logits, [row(params, context=[3, 60], num_prompt_tokens=2)], V)
    assert torch.equal(
        not_none(seen.probs), not_none(distribution(logits, [row(params, context=[3], num_prompt_tokens=1)], V).probs)
    )


def test_logprobs_come_from_p_and_leave_out_what_cannot_occur() -> None:
    logits = logits_of(1)
    p = distribution(logits, [row(SamplingParams(temperature=0.5, top_k=3))], V)
    best = int(p.argmax[0])
    (got,) = p.logprobs([(0, best, 10)])
    assert got.token_id == best
    assert got.logprob == pytest.approx(float(not_none(p.probs)[0, best].log()))
    assert len(got.top) == 3
    assert got.top[0] == (best, pytest.approx(got.logprob))
    assert [value for _, value in got.top] == sorted((value for _, value in got.top), reverse=True)
    assert p.logprobs([(0, best, 0)])[0].top == ()


def test_logprobs_of_a_greedy_row_are_those_of_temperature_one_after_bias() -> None:
    logits = logits_of(1)
    params = SamplingParams(logit_bias={5: 30.0})
    p = distribution(logits, [row(params)], V)
    biased = logits.clone()
    biased[0, 5] += 30.0
    assert p.logprobs([(0, 5, 2)])[0].logprob == pytest.approx(float(biased.log_softmax(dim=-1)[0, 5]), abs=1e-6)


def test_confidence_is_the_largest_probability() -> None:
    logits = logits_of(2)
    rows = [row(SamplingParams()), row(SamplingParams(temperature=0.6, top_k=4))]
    confidence = distribution(logits, rows, V).confidence()
    assert float(confidence[0]) == pytest.approx(float(logits[0].softmax(-1).max()))
    assert float(confidence[1]) == pytest.approx(float((logits[1].topk(4).values / 0.6).softmax(-1).max()), rel=1e-5)
    assert distribution(logits, [row(SamplingParams(), [1])], V).confidence().shape == (2,)


def test_inverse_cdf_takes_any_sum_and_never_a_token_of_weight_zero() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 6.0, 0.0]])
    for uniform, token in [(0.0, 1), (0.2499, 1), (0.25, 3), (1 - 2**-53, 3)]:
        assert inverse_cdf(weights, np.array([uniform])).tolist() == [token]


def test_samples_follow_p_and_greedy_rows_their_argmax() -> None:
    logits = logits_of(1, seed=2, num_tokens=6).expand(20_000, 6)
    warm, cold = SamplingParams(temperature=1.0, top_k=4), SamplingParams()
    rows = [row(warm if i % 2 else cold, context=[0]) for i in range(20_000)]
    p = distribution(logits, rows, 6)
    tokens = p.sample(uniforms_many([0] * 20_000, range(20_000), [1] * 20_000, Purpose.OWN, 1)[:, 0])
    assert torch.equal(tokens[::2], p.argmax[::2])
    frequencies = tokens[1::2].bincount(minlength=6) / 10_000
    torch.testing.assert_close(frequencies, not_none(p.probs)[1], atol=0.02, rtol=0)
