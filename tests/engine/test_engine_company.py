"""A request's text does not depend on its neighbours, on how many run together, or on how prompts are fed."""

import pytest
from tiny_engine import PROMPTS, alone, decode, tiny_engine, tokens

from specdec_cli.engine.verify import MODES
from specdec_cli.sampling.params import SamplingParams

DRAFTS = ("stranger", "itself", "ngram", "none")
COMPANIES = [
    {"max_num_seqs": 8},
    {"max_num_seqs": 2},
    {"max_num_seqs": 3, "max_num_batched_tokens": 5, "prefill_chunk": 4},
]


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("mode", MODES)
def test_alone_and_in_company(target, draft_of, mode, name):
    params = SamplingParams(max_new_tokens=14, temperature=0.0 if mode == "greedy" else 0.9, seed=5, top_p=0.95)

    def draft():
        return None if name == "none" else draft_of(name)

    single = [
        tokens(decode(target, draft(), 3, [prompt], [alone(params, i)], verify=mode))[0]
        for i, prompt in enumerate(PROMPTS)
    ]
    for company in COMPANIES:
        assert tokens(decode(target, draft(), 3, params=params, verify=mode, **company)) == single


@pytest.mark.parametrize("chunk", [1, 4, 7, 512])
@pytest.mark.parametrize("budget", [1, 5, 2048])
def test_how_prompts_are_fed_changes_nothing(target, stranger, chunk, budget):
    params = SamplingParams(max_new_tokens=10)
    expected = tokens(decode(target, None, 0, params=params))
    engine = tiny_engine(target, stranger, 3, prefill_chunk=chunk, max_num_batched_tokens=budget)
    for prompt in PROMPTS:
        engine.add(prompt, params)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    num_fed = 0
    while engine.has_work:
        stepped = engine.step()[0]
        num_fed += stepped.num_prefill_tokens
        assert stepped.num_prefill_tokens <= max(budget, chunk)
        for emitted in stepped.emitted:
            texts[emitted.sequence_id] += emitted.tokens
    assert texts == expected
    assert num_fed == sum(map(len, PROMPTS)), "every prompt token is fed once"


def test_requests_that_arrive_while_others_run(target, itself):
    params = SamplingParams(max_new_tokens=12, temperature=0.8)
    single = [tokens(decode(target, itself, 3, [prompt], [alone(params, i)]))[0] for i, prompt in enumerate(PROMPTS)]
    engine = tiny_engine(target, itself, 3, max_num_seqs=3)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, alone(params, i))
        for emitted in engine.step()[0].emitted:
            texts[emitted.sequence_id] += emitted.tokens
    while engine.has_work:
        for emitted in engine.step()[0].emitted:
            texts[emitted.sequence_id] += emitted.tokens
    assert texts == single


def test_a_second_run_is_like_the_first(target, stranger):
    """Nothing of a finished request is left in either model."""
    engine = tiny_engine(target, stranger, 4)
    params = SamplingParams(max_new_tokens=10, temperature=0.8)
    first = tokens(engine.generate(PROMPTS, params))
    assert tokens(engine.generate(PROMPTS, params)) == first
    assert tokens(engine.generate(PROMPTS[::-1], [alone(params, i) for i in (3, 2, 1, 0)])) == first[::-1]
