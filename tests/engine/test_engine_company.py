"""A request's text does not depend on its neighbours, on how many run together, or on how prompts are fed."""

import random

import pytest
from tiny_engine import PROMPTS, alone, check_books, decode, step_of, tiny_engine, tokens
from tiny_models import VOCAB
from typed import stand_in

from specdec_cli.lm.load import load_lm
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import MODES

DRAFTS = ("stranger", "itself", "ngram", "none")
COMPANIES = [
    {"max_num_seqs": 8},
    {"max_num_seqs": 2},
    {"max_num_seqs": 3, "max_num_batched_tokens": 5, "prefill_chunk": 4},
]


@pytest.mark.in_turn(2, every=6)
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("mode", MODES)
def test_alone_and_in_company(target, draft_of, mode, name) -> None:
    params = SamplingParams(max_new_tokens=14, temperature=0.0 if mode == "greedy" else 0.9, seed=5, top_p=0.95)

    def draft():
        return None if name == "none" else draft_of(name)

    single = [
        tokens(decode(target, draft(), 3, [prompt], [alone(params, i)], verify=mode))[0]
        for i, prompt in enumerate(PROMPTS)
    ]
    for company in COMPANIES:
        assert tokens(decode(target, draft(), 3, params=params, verify=mode, **stand_in(company))) == single


@pytest.mark.parametrize("chunk", [1, 4, 7, 512])
@pytest.mark.parametrize("budget", [1, 5, 2048])
def test_how_prompts_are_fed_changes_nothing(target, stranger, chunk: int, budget: int) -> None:
    params = SamplingParams(max_new_tokens=10)
    expected = tokens(decode(target, None, 0, params=params))
    engine = tiny_engine(target, stranger, 3, prefill_chunk=chunk, max_num_batched_tokens=budget)
    for prompt in PROMPTS:
        engine.add(prompt, params)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    num_fed = 0
    while engine.has_work:
        stepped = step_of(engine)
        num_fed += stepped.num_prefill_tokens
        assert stepped.num_prefill_tokens <= max(budget, chunk)
        for emitted in stepped.emitted:
            texts[emitted.sequence_id] += emitted.tokens
    assert texts == expected
    assert num_fed == sum(map(len, PROMPTS)), "every prompt token is fed once"


def test_requests_that_arrive_while_others_run(target, itself) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.8)
    single = [tokens(decode(target, itself, 3, [prompt], [alone(params, i)]))[0] for i, prompt in enumerate(PROMPTS)]
    engine = tiny_engine(target, itself, 3, max_num_seqs=3)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, alone(params, i))
        for emitted in step_of(engine).emitted:
            texts[emitted.sequence_id] += emitted.tokens
    while engine.has_work:
        for emitted in step_of(engine).emitted:
            texts[emitted.sequence_id] += emitted.tokens
    assert texts == single


def test_a_second_run_is_like_the_first(target, stranger) -> None:
    """Nothing of a finished request is left in either model."""
    engine = tiny_engine(target, stranger, 4)
    params = SamplingParams(max_new_tokens=10, temperature=0.8)
    first = tokens(engine.generate(PROMPTS, params))
    assert tokens(engine.generate(PROMPTS, params)) == first
    assert tokens(engine.generate(PROMPTS[::-1], [alone(params, i) for i in (3, 2, 1, 0)])) == first[::-1]


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("seed", range(4))
def test_arrivals_aborts_and_mixed_requests_at_random(folder, target, itself, seed) -> None:
    """Small blocks, few places, requests that come, go and differ: each text is what the request gets alone."""
    chance = random.Random(seed)
    draft = load_lm(itself.name, block_size=4)
    small = load_lm(target.name, block_size=4)
    engine = tiny_engine(small, draft, 3, max_num_seqs=3, prefill_chunk=5, max_num_batched_tokens=11)
    wanted, texts, aborted = {}, {}, set()
    while len(wanted) < 12 or engine.has_work:
        if len(wanted) < 12 and (chance.random() < 0.4 or not engine.has_work):
            mode = chance.choice(MODES[1:])
            request = (
                [chance.randrange(VOCAB) for _ in range(chance.randint(1, 40))],
                SamplingParams(
                    max_new_tokens=chance.randint(1, 30),
                    temperature=chance.choice([0.0, 0.6, 1.2]),
                    repetition_penalty=chance.choice([1.0, 1.3]),
                    seed=seed,
                    index=len(wanted),
                ),
                chance.choice([0, 1, 3, 7]),
                mode,
            )
            wanted[engine.add(*request)] = request
            continue
        if chance.random() < 0.05:
            [ended] = stand_in(engine.abort(chance.choice(list(engine._sequences))))
            aborted.add(ended.sequence_id)
            check_books(engine)
            continue
        for emitted in step_of(engine).emitted:
            texts.setdefault(emitted.sequence_id, []).extend(emitted.tokens)
    for number, (prompt, params, k, mode) in wanted.items():
        [single] = tiny_engine(target, itself, 3, verify=mode).generate([prompt], [params], k)
        text = texts.get(number, [])
        assert text == single.token_ids[: len(text) if number in aborted else None]
